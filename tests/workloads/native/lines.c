/* A native process that is in two loops on known lines: one in a function that the compiler puts into
   its caller, one in a function that it calls. */
#include <stdint.h>
#include <stdio.h>

static volatile uint64_t sink;

static inline __attribute__((always_inline)) uint64_t multiply(uint64_t value, uint64_t by)
{
    /* A comment before the loop. */
    for (uint64_t i = 0; i < 20000; i++)            // in multiply
        value = value * 31 + (i ^ by);              // in multiply
    return value;
}

__attribute__((noipa)) static uint64_t divide(uint64_t value)
{
    for (uint64_t i = 1; i < 4000; i++)             // in divide
        value = (value | 0x8000000000000000) / i;   // in divide
    return value;
}

__attribute__((noipa)) static void work(uint64_t round)
{
    uint64_t value = multiply(round, 3);            // call multiply
    value = divide(value);                          // call divide
    sink = value;
}

int main(void)
{
    puts("ready {}");
    fflush(stdout);
    for (uint64_t round = 0;; round++)
        work(round);
}
