// What every profiler of .NET written in C needs: a class factory, and an object whose methods do nothing until they are replaced.
#include <stdint.h>

typedef int32_t (*slot)();
typedef struct { slot *table; } object;

enum {
    INITIALIZE = 3,  // its slot in ICorProfilerCallback
    SLOTS = 98,      // to ICorProfilerCallback11
};

static slot callbacks[SLOTS], factory_table[5];
static object profiler = {callbacks}, factory = {factory_table};

// Puts what is not ignored into `callbacks`.
static void fill(void);

static int32_t ignored(void) { return 0; }

static int32_t query(object *this, const void *interface, object **out) {
    (void)interface;
    *out = this;
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
    fill();
    for (int i = 0; i < 5; i++) factory_table[i] = (slot)ignored;
    factory_table[0] = (slot)query;
    factory_table[3] = (slot)create;
    return query(&factory, interface, out);
}

int32_t DllCanUnloadNow(void) { return 1; }
