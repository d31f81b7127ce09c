/* Very many processes that do next to nothing: `crowd PROCESSES MILLISECONDS GROUPS FOLDER`. Each sleeps so long, again and again, in one of
   the cgroups FOLDER/0 to FOLDER/GROUPS-1. They end with this one. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

__attribute__((noinline)) static void sleep_in_the_crowd(long milliseconds)
{
    struct timespec pause = { .tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000 };
    nanosleep(&pause, NULL);
}

static int move_to(const char *folder, long group)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%ld/cgroup.procs", folder, group);
    FILE *file = fopen(path, "w");
    return file && fputs("0", file) >= 0 && fclose(file) == 0;
}

int main(int count, char **arguments)
{
    if (count != 5)
        return 2;
    long processes = atol(arguments[1]), milliseconds = atol(arguments[2]), groups = atol(arguments[3]);
    for (long number = 0; number < processes; number++) {
        pid_t pid = fork();
        if (pid < 0) {
            perror("fork");
            return 1;
        }
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            close(0);
            if (getppid() == 1 || !move_to(arguments[4], number % groups))
                _exit(1);
            close(1);
            /* Not all at the same moment. */
            sleep_in_the_crowd(milliseconds * number / processes);
            for (;;)
                sleep_in_the_crowd(milliseconds);
        }
    }
    puts("ready {}");
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}
