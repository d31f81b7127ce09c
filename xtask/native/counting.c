// The least a profiler of .NET can do that hears of every object: it counts calls. What it costs is the runtime's own floor for exact mode, which
// `cargo xtask bench exact` measures beside it. With COUNTING_GC in the environment it hears of survivors as well (COR_PRF_MONITOR_GC).
#include "profiler.h"
#include <stdlib.h>

enum {
    OBJECT_ALLOCATED = 0x100,      // COR_PRF_MONITOR_OBJECT_ALLOCATED
    ENABLE_OBJECT_ALLOCATED = 0x800000,
    MONITOR_GC = 0x80,
    SET_EVENT_MASK = 16,           // its slot in ICorProfilerInfo
    OBJECT = 50, BY_CLASS = 51,    // slots in ICorProfilerCallback
};

static const uint8_t PROFILER_INFO[16] =  // {28B5557D-3F3F-48b4-90B2-5F9EEA2F6C48}, ICorProfilerInfo
    {0x7d, 0x55, 0xb5, 0x28, 0x3f, 0x3f, 0xb4, 0x48, 0x90, 0xb2, 0x5f, 0x9e, 0xea, 0x2f, 0x6c, 0x48};

static __thread uint64_t counted;

static int32_t refused(void) { return (int32_t)0x80004005; }

static int32_t initialize(object *this, object *unknown) {
    (void)this;
    object *info;
    int32_t result = unknown->table[0](unknown, PROFILER_INFO, &info);
    if (result < 0) return result;
    uint32_t survivors = getenv("COUNTING_GC") ? MONITOR_GC : 0;
    return info->table[SET_EVENT_MASK](info, OBJECT_ALLOCATED | ENABLE_OBJECT_ALLOCATED | survivors);
}

static int32_t object_allocated(object *this, uintptr_t made, uintptr_t class) {
    (void)this, (void)made, (void)class;
    counted++;
    return 0;
}

static void fill(void) {
    callbacks[INITIALIZE] = (slot)initialize;
    callbacks[OBJECT] = (slot)object_allocated;
    // What it would be told at a collection costs the runtime 50 ns an object; refused once, it is not asked for again.
    callbacks[BY_CLASS] = (slot)refused;
}
