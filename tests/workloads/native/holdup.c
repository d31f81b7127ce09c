/* Sleeps for so many seconds, whatever signals come. */
#include <errno.h>
#include <time.h>

void hold_up(int seconds)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += seconds;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, 0) == EINTR)
        ;
}
