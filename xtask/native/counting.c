// The least a profiler of .NET can do that hears of every object: it counts calls. What it costs is the runtime's own floor for exact mode, which
// `cargo xtask bench exact` measures beside it. With COUNTING_GC in the environment it hears of survivors as well (COR_PRF_MONITOR_GC).
#include <stdint.h>
#include <stdlib.h>

typedef int32_t (*slot)();
typedef struct { slot *table; } object;

enum {
    OBJECT_ALLOCATED = 0x100,      // COR_PRF_MONITOR_OBJECT_ALLOCATED
    ENABLE_OBJECT_ALLOCATED = 0x800000,
    MONITOR_GC = 0x80,
    SET_EVENT_MASK = 16,           // its slot in ICorProfilerInfo
    INITIALIZE = 3, OBJECT = 50, BY_CLASS = 51,  // slots in ICorProfilerCallback
    SLOTS = 98,                    // to ICorProfilerCallback11
};

static const uint8_t PROFILER_INFO[16] =  // {28B5557D-3F3F-48b4-90B2-5F9EEA2F6C48}, ICorProfilerInfo
    {0x7d, 0x55, 0xb5, 0x28, 0x3f, 0x3f, 0xb4, 0x48, 0x90, 0xb2, 0x5f, 0x9e, 0xea, 0x2f, 0x6c, 0x48};

static slot callbacks[SLOTS], factory_table[5];
static object profiler = {callbacks}, factory = {factory_table};
static __thread uint64_t counted;

static int32_t ignored(void) { return 0; }
static int32_t refused(void) { return (int32_t)0x80004005; }

static int32_t query(object *this, const void *interface, object **out) {
    (void)interface;
    *out = this;
    return 0;
}

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

static int32_t create(object *this, object *outer, const void *interface, object **out) {
    (void)outer;
    (void)this;
    return query(&profiler, interface, out);
}

int32_t DllGetClassObject(const void *class, const void *interface, object **out) {
    (void)class;
    for (int i = 0; i < SLOTS; i++) callbacks[i] = (slot)ignored;
    callbacks[0] = (slot)query;
    callbacks[INITIALIZE] = (slot)initialize;
    callbacks[OBJECT] = (slot)object_allocated;
    // What it would be told at a collection costs the runtime 50 ns an object; refused once, it is not asked for again.
    callbacks[BY_CLASS] = (slot)refused;
    for (int i = 0; i < 5; i++) factory_table[i] = (slot)ignored;
    factory_table[0] = (slot)query;
    factory_table[3] = (slot)create;
    return query(&factory, interface, out);
}

int32_t DllCanUnloadNow(void) { return 1; }
