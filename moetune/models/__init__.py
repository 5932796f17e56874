"""Where a layer's shape comes from: the catalogue, a Hugging Face ``config.json``, or flags."""
