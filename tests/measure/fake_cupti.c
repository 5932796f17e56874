/* A libcupti and a libcuda of nothing but rules: it notes every call, checks what the headers ask of the caller, answers
   with planted errors, and "counts" what fake_launch launches. Compiled against CUPTI's own headers, by cupti_c.py. */

#define METRICS 16
#define RANGES 64

static char notes[1 << 16];
static char planted_name[64];
static int planted_code, planted_after;  /* that many calls succeed before */
static uint32_t version = 130001;
static int pushing_selects = 1;  /* whether kernels outside a pushed range are ignored */
static size_t passes = 1, extra_ranges = 0, dropped = 0;
static int all_submitted = 1;
enum { ANEW, REUSE, SILENT } sessions = ANEW;  /* a done session must be configured anew; need not; must, and nobody says so */
static double unit_value = 1.0;

static int initialized, enabled, configured, started, pushed, stopped, image_is_new, deaf;
static size_t launched, decoded, capacity;
static double kernels[RANGES], image[RANGES];
static char added[METRICS][128];
static size_t added_count;
static int context, host_object, range_object;
static uint8_t availability[24];
static int host_got_availability;

const char* fake_notes(void) { return notes; }
void fake_plant(const char* name, int code, int after) {
    snprintf(planted_name, sizeof planted_name, "%s", name);
    planted_code = code;
    planted_after = after;
}
void fake_version(uint32_t value) { version = value; }
void fake_rules(int selects, size_t needs, size_t more, size_t lost, int submitted, double unit) {
    pushing_selects = selects, passes = needs, extra_ranges = more, dropped = lost, all_submitted = submitted;
    unit_value = unit;
}
void fake_sessions(int kind) { sessions = kind; }
int fake_is_counting(void) { return started; }
void fake_launch(double size) {
    strcat(notes, "launch\n");
    if (started && !deaf && (pushed || !pushing_selects) && launched < RANGES) kernels[launched++] = size;
}

static int entered(const char* name, size_t given, size_t wanted, void* priv) {
    if (strlen(notes) < sizeof notes - 256) strcat(strcat(notes, name), "\n");
    if (given != wanted || priv != NULL) {
        strcat(notes, "WRONG STRUCT SIZE\n");
        return CUPTI_ERROR_INVALID_PARAMETER;
    }
    if (strcmp(name, planted_name) == 0 && planted_after-- <= 0) return planted_code;
    return 0;
}

#define ENTER(function, type)                                                                    \
    CUptiResult function(type* p) {                                                              \
        int error = entered(#function, p->structSize, type##_STRUCT_SIZE, p->pPriv);             \
        if (error) return (CUptiResult)error;
#define RULE(holds, error) if (!(holds)) { strcat(notes, "AGAINST THE RULES: " #holds "\n"); return error; }
#define LEAVE return CUPTI_SUCCESS; }
#define OBJECT RULE(enabled && p->pRangeProfilerObject == (void*)&range_object, CUPTI_ERROR_INVALID_OPERATION)

int cuCtxGetCurrent(CUcontext* out) { *out = (CUcontext)&context; return 0; }
int cuCtxGetDevice(CUdevice* out) { *out = 3; return 0; }
CUptiResult cuptiGetVersion(uint32_t* out) { *out = version; return CUPTI_SUCCESS; }
CUptiResult cuptiGetResultString(CUptiResult code, const char** out) {
    *out = code == CUPTI_ERROR_INSUFFICIENT_PRIVILEGES ? "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
         : code == CUPTI_ERROR_HARDWARE_BUSY ? "CUPTI_ERROR_HARDWARE_BUSY"
         : code == CUPTI_ERROR_INVALID_OPERATION ? "CUPTI_ERROR_INVALID_OPERATION" : NULL;
    return *out ? CUPTI_SUCCESS : CUPTI_ERROR_INVALID_PARAMETER;
}

ENTER(cuptiProfilerInitialize, CUpti_Profiler_Initialize_Params) initialized++; LEAVE
ENTER(cuptiProfilerDeInitialize, CUpti_Profiler_DeInitialize_Params)
    RULE(initialized && !enabled, CUPTI_ERROR_INVALID_OPERATION) initialized--; LEAVE
ENTER(cuptiDeviceGetChipName, CUpti_Device_GetChipName_Params)
    RULE(p->deviceIndex == 3, CUPTI_ERROR_INVALID_DEVICE) p->pChipName = "GH100"; LEAVE
ENTER(cuptiProfilerGetCounterAvailability, CUpti_Profiler_GetCounterAvailability_Params)
    RULE(initialized && !enabled && p->ctx == (CUcontext)&context, CUPTI_ERROR_INVALID_OPERATION)
    if (p->pCounterAvailabilityImage != NULL) {
        RULE(p->counterAvailabilityImageSize >= sizeof availability, CUPTI_ERROR_INVALID_PARAMETER)
        memset(p->pCounterAvailabilityImage, 7, sizeof availability);
    }
    p->counterAvailabilityImageSize = sizeof availability; LEAVE

ENTER(cuptiProfilerHostInitialize, CUpti_Profiler_Host_Initialize_Params)
    RULE(p->profilerType == CUPTI_PROFILER_TYPE_RANGE_PROFILER, CUPTI_ERROR_INVALID_PARAMETER)
    if (strcmp(p->pChipName, "GH100")) return CUPTI_ERROR_INVALID_CHIP_NAME;
    host_got_availability = p->pCounterAvailabilityImage != NULL && p->pCounterAvailabilityImage[23] == 7;
    added_count = 0;
    p->pHostObject = (CUpti_Profiler_Host_Object*)&host_object; LEAVE
ENTER(cuptiProfilerHostDeinitialize, CUpti_Profiler_Host_Deinitialize_Params)
    RULE((void*)p->pHostObject == &host_object && !started, CUPTI_ERROR_INVALID_PARAMETER) LEAVE
ENTER(cuptiProfilerHostGetBaseMetrics, CUpti_Profiler_Host_GetBaseMetrics_Params) p->numMetrics = 0; LEAVE
ENTER(cuptiProfilerHostGetMetricProperties, CUpti_Profiler_Host_GetMetricProperties_Params) LEAVE
ENTER(cuptiProfilerHostConfigAddMetrics, CUpti_Profiler_Host_ConfigAddMetrics_Params)
    RULE((void*)p->pHostObject == &host_object, CUPTI_ERROR_INVALID_PARAMETER)
    for (size_t i = 0; i < p->numMetrics; i++) {
        if (strstr(p->ppMetricNames[i], "__") == NULL) return CUPTI_ERROR_INVALID_METRIC_NAME;
        snprintf(added[added_count++], 128, "%s", p->ppMetricNames[i]);
    } LEAVE
ENTER(cuptiProfilerHostGetConfigImageSize, CUpti_Profiler_Host_GetConfigImageSize_Params)
    p->configImageSize = 40; LEAVE
ENTER(cuptiProfilerHostGetConfigImage, CUpti_Profiler_Host_GetConfigImage_Params)
    RULE(p->configImageSize == 40, CUPTI_ERROR_INVALID_PARAMETER) memset(p->pConfigImage, 9, 40); LEAVE
ENTER(cuptiProfilerHostGetNumOfPasses, CUpti_Profiler_Host_GetNumOfPasses_Params)
    RULE(p->configImageSize == 40 && p->pConfigImage[39] == 9, CUPTI_ERROR_INVALID_PARAMETER)
    p->numOfPasses = passes; LEAVE

ENTER(cuptiRangeProfilerEnable, CUpti_RangeProfiler_Enable_Params)
    RULE(initialized && !enabled && p->ctx == (CUcontext)&context, CUPTI_ERROR_INVALID_PARAMETER)
    enabled = 1; p->pRangeProfilerObject = (void*)&range_object; LEAVE
ENTER(cuptiRangeProfilerDisable, CUpti_RangeProfiler_Disable_Params)
    OBJECT RULE(!started, CUPTI_ERROR_INVALID_OPERATION) enabled = 0; LEAVE
ENTER(cuptiRangeProfilerGetCounterDataSize, CUpti_RangeProfiler_GetCounterDataSize_Params)
    OBJECT RULE(p->numMetrics == added_count && !strcmp(p->pMetricNames[0], added[0]), CUPTI_ERROR_INVALID_PARAMETER)
    RULE(p->maxNumRangeTreeNodes >= p->maxNumOfRanges, CUPTI_ERROR_INVALID_PARAMETER)
    capacity = p->maxNumOfRanges; p->counterDataSize = 56; LEAVE
ENTER(cuptiRangeProfilerCounterDataImageInitialize, CUpti_RangeProfiler_CounterDataImage_Initialize_Params)
    OBJECT RULE(p->counterDataSize == 56 && !started, CUPTI_ERROR_INVALID_PARAMETER)
    memset(p->pCounterData, 5, 56); decoded = 0; image_is_new = 1; LEAVE
ENTER(cuptiRangeProfilerSetConfig, CUpti_RangeProfiler_SetConfig_Params)
    OBJECT RULE(image_is_new && !started, CUPTI_ERROR_INVALID_OPERATION)
    RULE(p->configSize == 40 && p->pConfig[39] == 9, CUPTI_ERROR_INVALID_PARAMETER)
    RULE(p->counterDataImageSize == 56 && p->pCounterDataImage[55] == 5, CUPTI_ERROR_INVALID_PARAMETER)
    RULE(p->range == CUPTI_AutoRange && p->replayMode == CUPTI_KernelReplay, CUPTI_ERROR_INVALID_PARAMETER)
    RULE(p->numNestingLevels == 1 && p->minNestingLevel == 1 && p->passIndex == 0, CUPTI_ERROR_INVALID_PARAMETER)
    RULE(p->maxRangesPerPass == capacity && p->targetNestingLevel == 0, CUPTI_ERROR_INVALID_PARAMETER)
    configured = 1; LEAVE
ENTER(cuptiRangeProfilerStart, CUpti_RangeProfiler_Start_Params)
    OBJECT RULE(!started, CUPTI_ERROR_INVALID_OPERATION)
    if (!configured && sessions == ANEW) return CUPTI_ERROR_INVALID_OPERATION;
    deaf = !configured && sessions == SILENT;
    started = 1; configured = 0; launched = 0; LEAVE
ENTER(cuptiRangeProfilerPushRange, CUpti_RangeProfiler_PushRange_Params)
    OBJECT RULE(started && !pushed && p->pRangeName != NULL, CUPTI_ERROR_INVALID_OPERATION) pushed = 1; LEAVE
ENTER(cuptiRangeProfilerPopRange, CUpti_RangeProfiler_PopRange_Params)
    OBJECT RULE(started && pushed, CUPTI_ERROR_INVALID_OPERATION) pushed = 0; LEAVE
ENTER(cuptiRangeProfilerStop, CUpti_RangeProfiler_Stop_Params)
    OBJECT RULE(started, CUPTI_ERROR_INVALID_OPERATION)
    started = pushed = 0; stopped = 1; p->isAllPassSubmitted = (uint8_t)all_submitted; LEAVE
ENTER(cuptiRangeProfilerDecodeData, CUpti_RangeProfiler_DecodeData_Params)
    OBJECT RULE(stopped && image_is_new, CUPTI_ERROR_INVALID_OPERATION)
    memcpy(image, kernels, sizeof image);
    decoded = launched + extra_ranges; image_is_new = stopped = 0; p->numOfRangeDropped = dropped; LEAVE
ENTER(cuptiRangeProfilerGetCounterDataInfo, CUpti_RangeProfiler_GetCounterDataInfo_Params)
    RULE(p->counterDataImageSize == 56 && p->pCounterDataImage[55] == 5, CUPTI_ERROR_INVALID_PARAMETER)
    p->numTotalRanges = decoded; LEAVE
ENTER(cuptiProfilerHostEvaluateToGpuValues, CUpti_Profiler_Host_EvaluateToGpuValues_Params)
    RULE((void*)p->pHostObject == &host_object && host_got_availability, CUPTI_ERROR_INVALID_PARAMETER)
    RULE(p->rangeIndex < decoded && p->counterDataImageSize == 56, CUPTI_ERROR_INVALID_PARAMETER)
    for (size_t i = 0; i < p->numMetrics; i++) {
        RULE(!strcmp(p->ppMetricNames[i], added[i]), CUPTI_ERROR_INVALID_METRIC_NAME)
        p->pMetricValues[i] = strstr(added[i], "nan") ? 0.0 / 0.0 : unit_value * image[p->rangeIndex] * (double)(i + 1);
    } LEAVE
