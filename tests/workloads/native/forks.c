// Children of a process of many threads, made by fork without exec. What a child finds out it tells by its exit code.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

// Longer than any child takes on a busy machine: one that hangs ends by SIGALRM, which is then its status.
enum { PATIENCE_SECONDS = 60 };

// Whether the profiler's region is in this process. System calls only: after a fork beside other threads nothing else is safe.
static int has_region(void)
{
	static const char name[] = "memfd:perfusion";
	char text[8192];
	size_t kept = 0;
	int found = 0, maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
	if (maps < 0)
		return 1;
	for (;;) {
		ssize_t more = read(maps, text + kept, sizeof text - kept);
		if (more < 0 && errno == EINTR)
			continue;
		if (more <= 0)
			break;
		size_t bytes = kept + (size_t)more;
		found |= memmem(text, bytes, name, sizeof name - 1) != 0;
		// The name may go on in the next piece.
		kept = bytes < sizeof name - 2 ? bytes : sizeof name - 2;
		memmove(text, text + bytes - kept, kept);
	}
	close(maps);
	return found;
}

// The parent's own answer, which shows that a child's is worth something.
int forks_has_region(void)
{
	return has_region();
}

// A child that goes on in the caller: 0 in the child, its pid in the parent.
int forks_here(void)
{
	int child = fork();
	if (child == 0)
		alarm(PATIENCE_SECONDS);
	return child;
}

// A child that never returns to the runtime: it computes for a while, and ends with what came out, or with 127 when it has the parent's region.
int forks_away(unsigned seed)
{
	int child = forks_here();
	if (child != 0)
		return child;
	for (int i = 0; i < 1000000; i++)
		seed = seed * 1664525u + 1013904223u;
	_exit(has_region() ? 127 : (int)((seed >> 24) & 63));
}

// Ends the process as a forked child should: without what was registered for the parent's end.
void forks_leave(int code)
{
	_exit(has_region() ? 127 : code);
}

// How a child ended, as wait says it; -1 when there is none such.
int forks_await(int child)
{
	int status;
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			return -1;
	return status;
}
