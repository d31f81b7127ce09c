/* Two programs, one after the other, with one pid: `again FIRST SECOND`. The second one begins when a line comes; the first one is dead and
   reaped by then. They end with this one. clone3(2) has the pid chosen (CAP_CHECKPOINT_RESTORE). */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void become(const char *program, const char *service)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setenv("DD_SERVICE", service, 1);
    close(0);
    close(1);
    execl(program, program, (char *)NULL);
    _exit(127);
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    pid_t first = fork();
    if (first == 0)
        become(arguments[1], "first");
    printf("ready {\"pid\": %d}\n", first);
    fflush(stdout);
    if (getchar() == EOF)
        return 0;
    kill(first, SIGKILL);
    waitpid(first, NULL, 0);
    pid_t wanted = first;
    struct clone_args how = { .exit_signal = SIGCHLD, .set_tid = (uintptr_t)&wanted, .set_tid_size = 1 };
    long second;
    /* It may be in use: the kernel is not quite done with it. */
    while ((second = syscall(SYS_clone3, &how, sizeof how)) < 0 && errno == EEXIST) {
        struct timespec pause = { .tv_nsec = 1000000 };
        nanosleep(&pause, NULL);
    }
    if (second == 0)
        become(arguments[2], "second");
    printf("done {\"pid\": %ld, \"errno\": %d}\n", second, second < 0 ? errno : 0);
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}
