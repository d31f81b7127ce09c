/* Threads whose whole stacks are known: one that burns a CPU, one that sleeps again and again, one that sleeps since before anybody
 * looked. Built without frame pointers; needs nothing but a C library, so that it runs in a virtual machine that has nothing else. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static volatile uint64_t sink;

__attribute__((noipa)) static void spin_inner(void)
{
    for (uint64_t i = 0; i < 100000; i++)
        sink += i;
}

__attribute__((noipa)) static void spin_middle(int times)
{
    while (times--)
        spin_inner();
}

__attribute__((noipa)) static void spin_outer(void)
{
    for (;;)
        spin_middle(10);
}

__attribute__((noipa)) static void wait_inner(void)
{
    struct timespec time = { 0, 20000000 };
    nanosleep(&time, NULL);
    sink++;
}

__attribute__((noipa)) static void wait_outer(void)
{
    for (;;)
        wait_inner();
}

__attribute__((noipa)) static void asleep_inner(void)
{
    pause();
    sink++;
}

__attribute__((noipa)) static void asleep_outer(void)
{
    for (;;)
        asleep_inner();
}

static void *spin_thread(void *unused)
{
    spin_outer();
    return unused;
}

static void *wait_thread(void *unused)
{
    wait_outer();
    return unused;
}

static void *asleep_thread(void *unused)
{
    asleep_outer();
    return unused;
}

int main(void)
{
    pthread_t threads[3];
    pthread_create(&threads[0], NULL, spin_thread, NULL);
    pthread_create(&threads[1], NULL, wait_thread, NULL);
    pthread_create(&threads[2], NULL, asleep_thread, NULL);
    puts("ready {}");
    fflush(stdout);
    pthread_join(threads[0], NULL);
    return 0;
}
