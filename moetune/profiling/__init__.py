"""Where a layer's time goes: one page per layer and device, measured where there is a GPU, analytical elsewhere."""
