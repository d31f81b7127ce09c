// A file system whose server does not answer (FUSE), and what a process can make of it. `held DIRECTORY stack`: many threads sleep, their stack
// pointers to pages that are anonymous memory one moment and of a file that nobody ever reads the next. `held DIRECTORY program`: this program,
// run from such a file system, computes; when it says that it is ready nothing is answered any more. The directory is the mount's
// for a moment only.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 300, BYTES = 64 << 10, ROOT = 1, NODE = 2, MOST_BYTES = 1 << 17 };

static void check(int failed, const char *what)
{
	if (!failed)
		return;
	perror(what);
	exit(1);
}

static void answer(int fuse, uint64_t unique, int error, const void *body, size_t bytes)
{
	struct fuse_out_header head = { .len = sizeof head + (error ? 0 : bytes), .error = error, .unique = unique };
	struct iovec parts[2] = { { &head, sizeof head }, { (void *)body, error ? 0 : bytes } };
	// A request that was interrupted has nobody who wants an answer.
	if (writev(fuse, parts, 2) < 0)
		return;
}

static struct fuse_attr attributes(uint64_t node, off_t size)
{
	struct fuse_attr attr = { .ino = node, .size = size, .nlink = 1, .blksize = 4096 };
	attr.mode = node == ROOT ? S_IFDIR | 0755 : S_IFREG | 0755;
	return attr;
}

// Serves one file, `content`; without content its pages never come. Told by a signal, it reads requests and answers none.
static void serve(int fuse, int content)
{
	static char request[MOST_BYTES + 4096], data[MOST_BYTES];
	struct stat stat = { .st_size = BYTES };
	sigset_t quiet;
	sigemptyset(&quiet);
	sigaddset(&quiet, SIGUSR1);
	sigprocmask(SIG_BLOCK, &quiet, NULL);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (content >= 0)
		fstat(content, &stat);
	for (;;) {
		ssize_t got = read(fuse, request, sizeof request);
		if (got < 0)
			_exit(0);
		struct fuse_in_header *head = (struct fuse_in_header *)request;
		void *body = head + 1;
		sigset_t pending;
		sigpending(&pending);
		if (sigismember(&pending, SIGUSR1))
			continue;
		switch (head->opcode) {
		case FUSE_INIT: {
			struct fuse_init_out init = { .major = FUSE_KERNEL_VERSION, .minor = 31, .max_readahead = MOST_BYTES, .max_write = 4096 };
			answer(fuse, head->unique, 0, &init, sizeof init);
			break;
		}
		case FUSE_LOOKUP: {
			struct fuse_entry_out entry = { .nodeid = NODE, .attr = attributes(NODE, stat.st_size) };
			answer(fuse, head->unique, 0, &entry, sizeof entry);
			break;
		}
		case FUSE_GETATTR: {
			struct fuse_attr_out out = { .attr = attributes(head->nodeid, stat.st_size) };
			answer(fuse, head->unique, 0, &out, sizeof out);
			break;
		}
		case FUSE_OPEN: {
			struct fuse_open_out out = { .open_flags = FOPEN_KEEP_CACHE };
			answer(fuse, head->unique, 0, &out, sizeof out);
			break;
		}
		case FUSE_READ: {
			struct fuse_read_in *in = body;
			if (content < 0)
				break;
			ssize_t bytes = pread(content, data, in->size < MOST_BYTES ? in->size : MOST_BYTES, (off_t)in->offset);
			answer(fuse, head->unique, bytes < 0 ? -5 : 0, data, bytes < 0 ? 0 : (size_t)bytes);
			break;
		}
		case FUSE_FORGET:
		case FUSE_BATCH_FORGET:
		case FUSE_INTERRUPT:
			break;
		default:
			answer(fuse, head->unique, -38, NULL, 0);
		}
	}
}

// Mounts, opens the one file and unmounts: the file keeps the file system. Answers the file; `*server` is who serves it.
static int serve_in(const char *directory, int content, pid_t *server)
{
	char options[128], path[4096];
	int fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	check(fuse < 0, "/dev/fuse");
	snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", fuse);
	check(mount("held", directory, "fuse", MS_NOSUID | MS_NODEV, options), "mount");
	*server = fork();
	check(*server < 0, "fork");
	if (*server == 0)
		serve(fuse, content);
	close(fuse);
	snprintf(path, sizeof path, "%s/file", directory);
	int file = open(path, O_RDONLY | O_CLOEXEC);
	check(umount2(directory, MNT_DETACH), "umount");
	check(file < 0, path);
	return file;
}

static char *pages;
static atomic_int asleep;

// Sleeps with its stack pointer there.
static void *sleep_there(void *unused)
{
	struct timespec t = { 600, 0 };
	register long number __asm__("rax") = SYS_nanosleep;
	register void *request __asm__("rdi") = &t;
	register void *rest __asm__("rsi") = NULL;
	register char *there __asm__("rbx") = pages + 1024;
	atomic_fetch_add(&asleep, 1);
	__asm__ volatile("xchg %%rbx, %%rsp\n\tsyscall\n\txchg %%rbx, %%rsp"
		: "+r"(number), "+r"(there)
		: "r"(request), "r"(rest)
		: "rcx", "r11", "memory");
	return unused;
}

static long now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000L + t.tv_nsec;
}

// Maps what is given there, and leaves the mappings to others for as long as that took: on any machine whoever reads finds them free about half
// of the time, and they change soon after.
static void map(int protection, int flags, int file)
{
	long begin = now_ns(), end;
	mmap(pages, BYTES, protection, MAP_PRIVATE | MAP_FIXED | flags, file, 0);
	end = now_ns();
	while (now_ns() - end < end - begin)
		;
}

static void *swap(void *file)
{
	// Runs while somebody reads, also where others want a CPU.
	struct sched_param first = { .sched_priority = 1 };
	check(sched_setscheduler(0, SCHED_FIFO, &first), "sched_setscheduler");
	for (;;) {
		map(PROT_READ | PROT_WRITE, MAP_ANONYMOUS, -1);
		map(PROT_READ, 0, *(int *)file);
	}
	return NULL;
}

static atomic_bool stopping;
static volatile unsigned long sink;

__attribute__((noinline)) static void compute_here(void)
{
	for (int i = 0; i < 100000; i++)
		sink = sink * 31 + i;
}

static void *compute(void *unused)
{
	while (!atomic_load(&stopping))
		compute_here();
	return unused;
}

static void thread(void *(*body)(void *), void *argument)
{
	pthread_t thread;
	pthread_attr_t small;
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 64 << 10);
	check(pthread_create(&thread, &small, body, argument), "pthread_create");
}

int main(int argc, char **argv)
{
	char line[64];
	pid_t server;
	check(argc < 3, "usage: held DIRECTORY stack|program|SERVER");
	if (!strcmp(argv[2], "program")) {
		char number[32];
		int own = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
		int file = serve_in(argv[1], own, &server);
		snprintf(number, sizeof number, "%d", server);
		char *again[] = { argv[0], argv[1], number, NULL };
		fexecve(file, again, environ);
		check(1, "fexecve");
	}
	if (!strcmp(argv[2], "stack")) {
		int file = serve_in(argv[1], -1, &server);
		pages = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		check(pages == MAP_FAILED, "mmap");
		for (int i = 0; i < THREADS; i++)
			thread(sleep_there, NULL);
		while (atomic_load(&asleep) < THREADS)
			usleep(1000);
		thread(swap, &file);
	} else {
		server = atoi(argv[2]);
		thread(compute, NULL);
		// All of the program that will be needed is in memory before nothing comes any more.
		check(mlockall(MCL_CURRENT | MCL_FUTURE), "mlockall");
		kill(server, SIGUSR1);
	}
	printf("ready {}\n");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin) && strcmp(line, "stop\n"))
		;
	// With its server the file system ends, and so do all waits for it.
	kill(server, SIGKILL);
	waitpid(server, NULL, 0);
	printf("truth {}\n");
	fflush(stdout);
	_exit(0);
}
