// The least a profiler of .NET can do that hears of what the runtime tells of itself: it asks for the events that the shim asks for, and does nothing
// with them. What it costs is the runtime's own part of what `cargo xtask bench` measures of a recorded app. Two pipes in the environment say when:
// after a byte from LISTENING_ASKS, '1' to listen and '0' to stop, one to LISTENING_ANSWERS says that it does, and which answer the runtime gave.
#include "profiler.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    SET_EVENT_MASK_2 = 82, START_SESSION = 101, STOP_SESSION = 103,  // slots in ICorProfilerInfo12
    MODULE_LOADS = 0x4, THREADS = 0x200,
    DYNAMIC_FUNCTION_UNLOADS = 0x4, BASIC_GC = 0x10, EVENT_PIPE = 0x80,
    GC = 0x1, CONTENTION = 0x4000, EXCEPTION = 0x8000,
};

static const uint8_t PROFILER_INFO_12[16] =  // {27B24CCD-1CB1-47C5-96EE-98190DC30959}
    {0xcd, 0x4c, 0xb2, 0x27, 0xb1, 0x1c, 0xc5, 0x47, 0x96, 0xee, 0x98, 0x19, 0x0d, 0xc3, 0x09, 0x59};

// COR_PRF_EVENTPIPE_PROVIDER_CONFIG
typedef struct { const uint16_t *name; uint64_t keywords; uint32_t level; const uint16_t *filter; } provider;

static object *info;

static void *obey(void *nothing) {
    int asks = open(getenv("LISTENING_ASKS"), O_RDONLY), answers = open(getenv("LISTENING_ANSWERS"), O_WRONLY);
    provider runtime = {u"Microsoft-Windows-DotNETRuntime", 0, 0, NULL};
    // From .NET 10 on allocations are sampled by a keyword of their own.
    const char *sampled = getenv("LISTENING_SAMPLED");
    runtime.keywords = GC | CONTENTION | EXCEPTION | (sampled ? 0x80000000000 : 0);
    runtime.level = sampled ? 4 : 5;
    uint64_t session = 0;
    for (char what; read(asks, &what, 1) == 1;) {
        int32_t answer = what == '1' ? info->table[START_SESSION](info, 1, &runtime, 0, &session)
                                     : info->table[STOP_SESSION](info, session);
        if (write(answers, answer < 0 ? "-" : "+", 1) != 1) break;
    }
    return nothing;
}

static int32_t initialize(object *this, object *unknown) {
    (void)this;
    int32_t result = unknown->table[0](unknown, PROFILER_INFO_12, &info);
    if (result < 0) return result;
    pthread_t thread;
    if (pthread_create(&thread, NULL, obey, NULL) != 0) return (int32_t)0x80004005;
    return info->table[SET_EVENT_MASK_2](info, MODULE_LOADS | THREADS, DYNAMIC_FUNCTION_UNLOADS | BASIC_GC | EVENT_PIPE);
}

static void fill(void) { callbacks[INITIALIZE] = (slot)initialize; }
