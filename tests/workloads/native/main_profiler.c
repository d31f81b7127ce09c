/* Another CLR profiler, in the main slot, written by hand: what an APM's would be. It counts collections and the allocation
 * events it receives, and with MAIN_PROFILER_SESSION=1 it runs an EventPipe session of its own (keyword gc, level verbose), whose
 * events the runtime then delivers to every other profiler of the process too. With MAIN_PROFILER_OBJECTS=1 it is told of every object. At shutdown it writes its counts to the file
 * named by MAIN_PROFILER_OUT, so that the test knows that it was really there.
 * Slots and interface ids: corprof.idl of dotnet/runtime. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int32_t hresult;
typedef struct { uint32_t a; uint16_t b, c; uint8_t d[8]; } guid;
struct object { void **vtable; };
#define E_NOINTERFACE ((hresult)0x80004002)
#define SLOT(object, n, type) ((type)((object)->vtable[n]))

static const guid IID_CLASS_FACTORY = {0x00000001, 0, 0, {0xC0, 0, 0, 0, 0, 0, 0, 0x46}};
static const guid IID_CALLBACK11 = {0x42350846, 0xAAED, 0x47F7, {0xB1, 0x28, 0xFD, 0x0C, 0x98, 0x88, 0x1C, 0xDE}};
static const guid IID_CALLBACK2 = {0x8A8CC829, 0xCCF2, 0x49FE, {0xBB, 0xAE, 0x0F, 0x02, 0x22, 0x28, 0x07, 0x1A}};
static const guid IID_INFO12 = {0x27B24CCD, 0x1CB1, 0x47C5, {0x96, 0xEE, 0x98, 0x19, 0x0D, 0xC3, 0x09, 0x59}};

static struct object *info;
static long collections, allocation_events, objects;

struct provider { const uint16_t *name; uint64_t keywords; uint32_t level; const uint16_t *filter; };
static const uint16_t DOTNET_RUNTIME[] = u"Microsoft-Windows-DotNETRuntime";

static uint32_t one(void) { return 1; }
static hresult ok(void) { return 0; }

static hresult initialize(struct object *self, struct object *unknown)
{
    (void)self;
    if (SLOT(unknown, 0, hresult (*)(void *, const guid *, void **))(unknown, &IID_INFO12, (void **)&info))
        return (hresult)0x80004005;
    /* OBJECT_ALLOCATED and ENABLE_OBJECT_ALLOCATED */
    const char *every = getenv("MAIN_PROFILER_OBJECTS");
    uint32_t low = every && *every == '1' ? 0x100 | 0x800000 : 0;
    /* THREADS; BASIC_GC and EVENT_PIPE */
    hresult failed = SLOT(info, 82, hresult (*)(void *, uint32_t, uint32_t))(info, low | 0x200, 0x10 | 0x80);
    const char *session = getenv("MAIN_PROFILER_SESSION");
    if (!failed && session && *session == '1') {
        struct provider gc_verbose = {DOTNET_RUNTIME, 1, 5, NULL};
        uint64_t id;
        failed = SLOT(info, 101, hresult (*)(void *, uint32_t, struct provider *, int32_t, uint64_t *))(info, 1, &gc_verbose, 0, &id);
    }
    return failed;
}

static hresult event(struct object *self, uintptr_t provider, uint32_t id)
{
    (void)self;
    (void)provider;
    if (id == 10 || id == 303) /* AllocationTick, AllocationSampled */
        __atomic_fetch_add(&allocation_events, 1, __ATOMIC_RELAXED);
    return 0;
}

static hresult allocated(void)
{
    __atomic_fetch_add(&objects, 1, __ATOMIC_RELAXED);
    return 0;
}

static hresult collected(void)
{
    collections++;
    return 0;
}

static hresult shutdown_profiler(void)
{
    const char *path = getenv("MAIN_PROFILER_OUT");
    FILE *out = path ? fopen(path, "w") : NULL;
    if (out) {
        fprintf(out, "{\"collections\":%ld,\"allocation_events\":%ld,\"objects\":%ld}\n", collections, allocation_events, objects);
        fclose(out);
    }
    return 0;
}

static void *callback_slots[98];
static struct object callback = {callback_slots};

static hresult query_callback(struct object *self, const guid *iid, void **out)
{
    int known = !memcmp(iid, &IID_CALLBACK2, sizeof *iid) || !memcmp(iid, &IID_CALLBACK11, sizeof *iid);
    *out = known ? self : NULL;
    return known ? 0 : E_NOINTERFACE;
}

static hresult create(struct object *self, void *outer, const guid *iid, void **out)
{
    (void)self;
    (void)outer;
    for (int slot = 3; slot < 98; slot++)
        callback_slots[slot] = ok;
    callback_slots[0] = query_callback;
    callback_slots[1] = callback_slots[2] = one;
    callback_slots[3] = initialize;
    callback_slots[4] = shutdown_profiler;
    callback_slots[50] = allocated;
    callback_slots[75] = collected;
    callback_slots[95] = event;
    return query_callback(&callback, iid, out);
}

static void *factory_slots[5] = {NULL, one, one, create, ok};
static struct object factory = {factory_slots};

__attribute__((visibility("default")))
hresult DllGetClassObject(const guid *clsid, const guid *iid, void **out)
{
    (void)clsid;
    factory_slots[0] = query_callback;
    *out = memcmp(iid, &IID_CLASS_FACTORY, sizeof *iid) ? NULL : &factory;
    return *out ? 0 : E_NOINTERFACE;
}

__attribute__((visibility("default")))
hresult DllCanUnloadNow(void) { return 1; }
