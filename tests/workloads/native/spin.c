/* A native process that burns a CPU in a named function. Built with musl-gcc it is the musl process of the tests. */
#include <stdint.h>
#include <stdio.h>

static volatile uint64_t sink;

__attribute__((noinline)) static void spin_here(void)
{
    for (uint64_t i = 0; i < 1000000; i++)
        sink += i;
}

int main(void)
{
    puts("ready {}");
    fflush(stdout);
    for (;;)
        spin_here();
}
