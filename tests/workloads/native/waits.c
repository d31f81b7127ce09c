// Threads that wait in known ways for known lengths, again and again, each wait written down with its begin and end by the clock. A thread
// that waits for another one has a partner, which only sleeps and ends the wait. With the argument `spin` there is one thread that never
// waits by itself, and writes down when it was kept from running. With `storm` some threads give up their CPU all the time, one
// sleeps for seconds, and one waits in four ways in turn; with `deep-storm` they have large stacks. With `faulty-stack` one thread's stack pointer points to where reading is held back for ever, and another sleeps. With
// `new-stack` a thread's stack grows into pages it has not used yet, which another one brings in late. With `mappings` some threads nap
// while others hold the lock of the process's mappings all the time. With `realtime` a thread of a real-time class runs for a while, with
// short sleeps in between, and then sleeps for good; `slept` in the ready line is 1 if the kernel allowed the class. With `starved` threads
// that all want the same CPU get it all the time, if they are called busy, or hardly ever, and one that naps in between waits long for
// it. With `limited` one wants it and another one naps. With `large-frame` threads sleep with large stacks, and with `handlers` threads sleep and
// compute in signal handlers on stacks of their own. With `uring` a worker of the kernel's serves the process; `served` in the ready line is 1 if the
// kernel lets it. With `coroutine` a thread sleeps on a stack it made for itself (makecontext). With `first-ended` the process's first thread has ended, and others sleep and compute.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

enum { MOST_THREADS = 32, MOST_TIMES = 1 << 16 };

struct worker {
	const char *name;
	void (*step)(void);
	// Written by the thread, read when it has seen `stopping`, or does not write any more.
	long *times;
	atomic_int used;
	atomic_int tid;
};

static struct worker workers[MOST_THREADS];
static int worker_count;
static atomic_bool stopping;

static void check(int failed, const char *what)
{
	if (!failed)
		return;
	perror(what);
	exit(1);
}

static long now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void sleep_ms(long ms)
{
	struct timespec t = { 0, ms * 1000000 };
	nanosleep(&t, NULL);
}

static void note(struct worker *self, long begin, long end)
{
	int used = atomic_load(&self->used);
	if (!self->times || used + 2 > MOST_TIMES)
		return;
	self->times[used] = begin;
	self->times[used + 1] = end;
	atomic_store(&self->used, used + 2);
}

static void *run(void *argument)
{
	struct worker *self = argument;
	pthread_setname_np(pthread_self(), self->name);
	atomic_store(&self->tid, (int)syscall(SYS_gettid));
	while (!atomic_load(&stopping)) {
		long begin = now();
		self->step();
		note(self, begin, now());
	}
	return NULL;
}

static void start_with(const pthread_attr_t *attributes, const char *name, void (*step)(void), int timed)
{
	struct worker *self = &workers[worker_count++];
	pthread_t thread;
	self->name = name;
	self->step = step;
	self->times = timed ? calloc(MOST_TIMES, sizeof(long)) : NULL;
	check(pthread_create(&thread, attributes, run, self), "pthread_create");
}

static void start(const char *name, void (*step)(void), int timed) { start_with(NULL, name, step, timed); }

// Waits that a timer ends.
static void wait_sleep(void) { sleep_ms(40); }
static void wait_poll(void) { poll(NULL, 0, 45); }
static void wait_select(void)
{
	struct timeval t = { 0, 50000 };
	select(0, NULL, NULL, NULL, &t);
}
static void wait_epoll(void)
{
	struct epoll_event event;
	static int epoll = -1;
	if (epoll < 0)
		epoll = epoll_create1(0);
	epoll_wait(epoll, &event, 1, 55);
}

static void wait_in_turn(void)
{
	static void (*const ways[])(void) = { wait_sleep, wait_poll, wait_select, wait_epoll };
	static int turn;
	ways[turn++ % 4]();
}

// Waits that another thread ends.
static atomic_int word;
static void wait_futex(void)
{
	while (!atomic_exchange(&word, 0))
		syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
}
static void end_futex(void)
{
	sleep_ms(60);
	atomic_store(&word, 1);
	syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static int tube[2], wire[2], listener;
static struct sockaddr_un address;
static void get(int from)
{
	char byte;
	check(read(from, &byte, 1) != 1, "read");
}
static void put(int to)
{
	sleep_ms(65);
	check(write(to, "x", 1) != 1, "write");
}
static void wait_pipe(void) { get(tube[0]); }
static void end_pipe(void) { put(tube[1]); }
static void wait_socket(void) { get(wire[0]); }
static void end_socket(void) { put(wire[1]); }
static void wait_accept(void) { close(accept(listener, NULL, NULL)); }
static void end_accept(void)
{
	int s = socket(AF_UNIX, SOCK_STREAM, 0);
	sleep_ms(70);
	check(connect(s, (struct sockaddr *)&address, sizeof(sa_family_t) + 1 + strlen(address.sun_path + 1)), "connect");
	close(s);
}

static void wait_child(void)
{
	pid_t child = fork();
	if (child == 0) {
		sleep_ms(75);
		_exit(0);
	}
	waitpid(child, NULL, 0);
}

// A page that another thread brings in late.
static int faults;
static char *page;
static void wait_fault(void)
{
	(void)*(volatile char *)page;
	check(madvise(page, 4096, MADV_DONTNEED), "madvise");
}
static void end_fault(void)
{
	struct uffd_msg message;
	check(read(faults, &message, sizeof message) != sizeof message, "read userfaultfd");
	sleep_ms(60);
	struct uffdio_zeropage zero = { .range = { message.arg.pagefault.address & ~4095UL, 4096 } };
	check(ioctl(faults, UFFDIO_ZEROPAGE, &zero), "UFFDIO_ZEROPAGE");
}

// Runs to the end of the process, and finds out when it did not.
static void spin(void)
{
	struct worker *self = &workers[0];
	long last = now();
	for (;;) {
		long next = now();
		if (next - last > 5000000)
			note(self, last, next);
		last = next;
	}
}

// Gives a thread, by default the one that asks, the first CPU the process may have, and no other.
static void bind_to_one_cpu(pid_t tid)
{
	cpu_set_t allowed, one;
	int cpu = 0;
	check(sched_getaffinity(getpid(), sizeof allowed, &allowed), "sched_getaffinity");
	while (!CPU_ISSET(cpu, &allowed))
		cpu++;
	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	check(sched_setaffinity(tid, sizeof one, &one), "sched_setaffinity");
}

// The threads of a storm have one CPU between them, however many the machine has: with one each, none would ever lose it.
static void share_one_cpu(void)
{
	static _Thread_local int is_bound;
	if (is_bound)
		return;
	bind_to_one_cpu(0);
	is_bound = 1;
}

static void storm(void)
{
	share_one_cpu();
	sched_yield();
}

// The same on a large stack, all of which is copied while nobody knows how to walk it.
__attribute__((noinline)) static void deep_storm(void)
{
	volatile char large[24 << 10];
	share_one_cpu();
	large[0] = large[sizeof large - 1] = 1;
	sched_yield();
	(void)large[0];
}
static void wait_asleep(void)
{
	struct timespec t = { 600, 0 };
	nanosleep(&t, NULL);
}

// Asleep since before the profiler came, with a frame between it and the thread's start that is larger than the copies samples get.
__attribute__((noinline)) static void wait_in_large_frame(void)
{
	volatile char large[48 << 10];
	large[0] = 1;
	wait_asleep();
	large[1] = large[0];
}

// Larger than any copy.
__attribute__((noinline)) static void wait_in_huge_frame(void)
{
	volatile char huge[300000];
	huge[0] = 1;
	wait_asleep();
	huge[1] = huge[0];
}

__attribute__((noipa)) static int recurse(int depth)
{
	volatile char large[2000];
	large[0] = 1;
	if (depth)
		return recurse(depth - 1) + large[0];
	wait_asleep();
	return large[0];
}

static void wait_in_recursion(void) { recurse(300); }

// In the handler of a signal, on a stack of its own, which is below the one it interrupts (static memory is below all that is mapped), or above.
static char low_stacks[4][256 << 10];
static atomic_int low_used;

__attribute__((noipa)) static void compute(void)
{
	while (!atomic_load(&stopping))
		;
}

static void handle_sleep(int unused)
{
	(void)unused;
	wait_asleep();
	__asm__ volatile("");
}

static void handle_naps(int unused)
{
	(void)unused;
	while (!atomic_load(&stopping))
		sleep_ms(20);
}

static void handle_compute(int unused)
{
	(void)unused;
	compute();
	__asm__ volatile("");
}

__attribute__((noipa)) static int interrupted(void *stack, size_t bytes, void (*handler)(int), int number)
{
	stack_t other = { .ss_sp = stack, .ss_size = bytes };
	struct sigaction action = { .sa_handler = handler, .sa_flags = SA_ONSTACK };
	check(sigaltstack(&other, NULL) || sigaction(number, &action, NULL), "sigaltstack");
	return raise(number) + 1;
}

static void wait_below(void) { interrupted(low_stacks[atomic_fetch_add(&low_used, 1)], sizeof *low_stacks, handle_sleep, SIGRTMIN); }
static void naps_below(void) { interrupted(low_stacks[atomic_fetch_add(&low_used, 1)], sizeof *low_stacks, handle_naps, SIGRTMIN + 1); }
static void computes_below(void) { interrupted(low_stacks[atomic_fetch_add(&low_used, 1)], sizeof *low_stacks, handle_compute, SIGRTMIN + 2); }

static void interrupt_above(void (*handler)(int), int number)
{
	enum { BYTES = 256 << 10 };
	void *high = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	check(high == MAP_FAILED, "mmap");
	interrupted(high, BYTES, handler, number);
}
static void wait_above(void) { interrupt_above(handle_sleep, SIGRTMIN + 3); }
static void computes_above(void) { interrupt_above(handle_compute, SIGRTMIN + 4); }

static void nap(void) { sleep_ms(20); }

// Threads that want a CPU all the time, and one that hardly gets one when it wakes.
__attribute__((noinline)) static void want_cpu(void)
{
	for (;;)
		__asm__ volatile("");
}
static void wait_nap(void) { sleep_ms(50); }

// From outside: a thread that has left its CPU to others might take long to say that it has.
static void starve(void)
{
	struct sched_param none = { 0 };
	for (int i = 0; i < worker_count; i++) {
		pid_t tid;
		while (!(tid = atomic_load(&workers[i].tid)))
			sched_yield();
		bind_to_one_cpu(tid);
		if (strstr(workers[i].name, "starved"))
			check(sched_setscheduler(tid, SCHED_IDLE, &none), "sched_setscheduler");
		else if (strstr(workers[i].name, "nap"))
			check(setpriority(PRIO_PROCESS, tid, 19), "setpriority");
	}
}

// Under the lock nearly all the time: 2,048 pages take longer than what is between two calls.
static void hold_mappings(void)
{
	enum { BYTES = 8 << 20 };
	char *all = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	check(all == MAP_FAILED, "mmap");
	madvise(all, BYTES, MADV_NOHUGEPAGE);
	memset(all, 1, BYTES);
	while (!atomic_load(&stopping)) {
		check(mprotect(all, BYTES, PROT_READ), "mprotect");
		check(mprotect(all, BYTES, PROT_READ | PROT_WRITE), "mprotect");
	}
}

static atomic_int settled;
static void wait_realtime(void)
{
	struct sched_param parameters = { .sched_priority = 1 };
	int refused = pthread_setschedparam(pthread_self(), SCHED_FIFO, &parameters);
	for (int slice = 0; !refused && slice < 10; slice++) {
		struct timespec ran;
		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ran);
		long until = ran.tv_sec * 1000000000L + ran.tv_nsec + 60000000;
		while (ran.tv_sec * 1000000000L + ran.tv_nsec < until)
			clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ran);
		sleep_ms(1);
	}
	atomic_store(&settled, refused ? 2 : 1);
	wait_asleep();
}

static void wait_long(void)
{
	struct timespec t = { 3, 0 };
	nanosleep(&t, NULL);
}

// Sleeps with a stack pointer into memory whose pages are missing and that nobody ever fills: whoever reads its stack faults.
static void wait_faulty_stack(void)
{
	struct timespec t = { 600, 0 };
	register long number __asm__("rax") = SYS_nanosleep;
	register void *request __asm__("rdi") = &t;
	register void *rest __asm__("rsi") = NULL;
	register char *faulty __asm__("rbx") = page + 2048;
	__asm__ volatile("xchg %%rbx, %%rsp\n\tsyscall\n\txchg %%rbx, %%rsp"
		: "+r"(number), "+r"(faulty)
		: "r"(request), "r"(rest)
		: "rcx", "r11", "memory");
}

// Makes itself a frame of some pages and writes to the lowest: at the fault the stack pointer is in a page that is not there.
__attribute__((noinline)) static void grow_inner(void)
{
	volatile char large[6 * 4096];
	large[0] = 1;
	(void)large[0];
}

__attribute__((noinline)) static void grow_outer(void)
{
	grow_inner();
	__asm__ volatile("");
}

static void hold_back(void *from, unsigned long bytes)
{
	struct uffdio_register all = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	all.range.start = (unsigned long)from;
	all.range.len = bytes;
	check(ioctl(faults, UFFDIO_REGISTER, &all), "UFFDIO_REGISTER");
}

static void wait_new_stack(void)
{
	static char *unused;
	enum { UNUSED = 8 * 4096 };
	if (!unused) {
		pthread_attr_t attributes;
		void *lowest;
		size_t bytes;
		check(pthread_getattr_np(pthread_self(), &attributes) || pthread_attr_getstack(&attributes, &lowest, &bytes), "pthread_getattr_np");
		// What the other functions called from here need is above it. Up to the end, so that the stack stays one mapping.
		unused = (char *)((unsigned long)__builtin_frame_address(0) & ~4095UL) - 3 * 4096 - UNUSED;
		hold_back(unused, (unsigned long)lowest + bytes - (unsigned long)unused);
	}
	grow_outer();
	check(madvise(unused, UNUSED, MADV_DONTNEED), "madvise");
}

static void in_coroutine(void)
{
	wait_asleep();
	__asm__ volatile("");
}

static void wait_in_coroutine(void)
{
	static char stack[64 << 10];
	static ucontext_t coroutine, thread;
	check(getcontext(&coroutine), "getcontext");
	coroutine.uc_stack.ss_sp = stack;
	coroutine.uc_stack.ss_size = sizeof stack;
	coroutine.uc_link = &thread;
	makecontext(&coroutine, in_coroutine, 0);
	check(swapcontext(&thread, &coroutine), "swapcontext");
}

// A read that a worker of the kernel's is to do (io_uring). Answers whether the kernel has that.
static int be_served(void)
{
	static char byte;
	struct io_uring_params is = { 0 };
	int ring = (int)syscall(SYS_io_uring_setup, 8, &is);
	if (ring < 0)
		return 0;
	char *tails = mmap(NULL, is.sq_off.array + is.sq_entries * sizeof(unsigned), PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
	struct io_uring_sqe *entry = mmap(NULL, is.sq_entries * sizeof *entry, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
	check(tails == MAP_FAILED || entry == MAP_FAILED || pipe(tube), "io_uring");
	*entry = (struct io_uring_sqe) { .opcode = IORING_OP_READ, .flags = IOSQE_ASYNC, .fd = tube[0], .addr = (unsigned long)&byte, .len = 1 };
	((unsigned *)(tails + is.sq_off.array))[0] = 0;
	__atomic_store_n((unsigned *)(tails + is.sq_off.tail), 1, __ATOMIC_RELEASE);
	check(syscall(SYS_io_uring_enter, ring, 1, 0, 0, NULL, 0) != 1, "io_uring_enter");
	return 1;
}

static void prepare(void)
{
	struct uffdio_api api = { .api = UFFD_API };
	check(pipe(tube), "pipe");
	check(socketpair(AF_UNIX, SOCK_STREAM, 0, wire), "socketpair");
	// An abstract address: nothing to remove.
	address.sun_family = AF_UNIX;
	snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "perfusion-waits-%d", getpid());
	listener = socket(AF_UNIX, SOCK_STREAM, 0);
	check(bind(listener, (struct sockaddr *)&address, sizeof(sa_family_t) + 1 + strlen(address.sun_path + 1)), "bind");
	check(listen(listener, 8), "listen");
	page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	check(page == MAP_FAILED, "mmap");
	faults = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	check(faults < 0, "userfaultfd");
	check(ioctl(faults, UFFDIO_API, &api), "UFFDIO_API");
	hold_back(page, 4096);
}

static void *await_stop(void *unused)
{
	char line[64];
	(void)unused;
	while (fgets(line, sizeof line, stdin) && strcmp(line, "stop\n"))
		;
	atomic_store(&stopping, 1);
	printf("truth {");
	const char *between = "";
	for (int i = 0; i < worker_count; i++) {
		struct worker *worker = &workers[i];
		if (!worker->times)
			continue;
		printf("%s\"%s\":[", between, worker->name);
		int used = atomic_load(&worker->used);
		for (int t = 0; t < used; t++)
			printf("%s%ld", t ? "," : "", worker->times[t]);
		printf("]");
		between = ",";
	}
	printf("}\n");
	fflush(stdout);
	// The threads still wait for each other; the process need not.
	_exit(0);
}

int main(int argc, char **argv)
{
	int served = -1;
	if (argc > 1 && !strcmp(argv[1], "spin")) {
		start("spin", spin, 1);
	} else if (argc > 1 && strstr(argv[1], "storm")) {
		start("wait-long", wait_long, 1);
		start("wait-turns", wait_in_turn, 1);
		for (int i = 0; i < 4; i++)
			start("storm", strcmp(argv[1], "storm") ? deep_storm : storm, 0);
	} else if (argc > 1 && !strcmp(argv[1], "mappings")) {
		for (int i = 0; i < 24; i++)
			start("nap", nap, 0);
		for (int i = 0; i < 2; i++)
			start("mapper", hold_mappings, 0);
	} else if (argc > 1 && !strcmp(argv[1], "starved")) {
		static const char *const starved[] = { "starved-1", "starved-2", "starved-3", "starved-4", "starved-5", "starved-6" };
		start("wait-nap", wait_nap, 1);
		for (unsigned i = 0; i < sizeof starved / sizeof *starved; i++)
			start(starved[i], want_cpu, 0);
		start("busy-1", want_cpu, 0);
		start("busy-2", want_cpu, 0);
		starve();
	} else if (argc > 1 && !strcmp(argv[1], "limited")) {
		start("wait-nap", wait_nap, 1);
		start("busy", want_cpu, 0);
		for (int i = 0; i < worker_count; i++) {
			while (!atomic_load(&workers[i].tid))
				sched_yield();
			bind_to_one_cpu(atomic_load(&workers[i].tid));
		}
	} else if (argc > 1 && !strcmp(argv[1], "realtime")) {
		start("realtime", wait_realtime, 0);
		while (!atomic_load(&settled))
			sleep_ms(1);
	} else if (argc > 1 && !strcmp(argv[1], "faulty-stack")) {
		prepare();
		start("faulty-stack", wait_faulty_stack, 0);
		start("asleep", wait_asleep, 0);
	} else if (argc > 1 && !strcmp(argv[1], "large-frame")) {
		start("large-frame", wait_in_large_frame, 0);
		start("huge-frame", wait_in_huge_frame, 0);
		start("recursion", wait_in_recursion, 0);
	} else if (argc > 1 && !strcmp(argv[1], "handlers")) {
		static char stacks[2][256 << 10] __attribute__((aligned(4096)));
		pthread_attr_t low[2];
		start("wait-below", wait_below, 0);
		start("naps-below", naps_below, 0);
		start("computes-below", computes_below, 0);
		for (int i = 0; i < 2; i++)
			check(pthread_attr_init(&low[i]) || pthread_attr_setstack(&low[i], stacks[i], sizeof *stacks), "pthread_attr_setstack");
		start_with(&low[0], "wait-above", wait_above, 0);
		start_with(&low[1], "computes-above", computes_above, 0);
	} else if (argc > 1 && !strcmp(argv[1], "coroutine")) {
		start("coroutine", wait_in_coroutine, 0);
	} else if (argc > 1 && !strcmp(argv[1], "uring")) {
		served = be_served();
	} else if (argc > 1 && !strcmp(argv[1], "first-ended")) {
		start("asleep", wait_asleep, 0);
		start("computes", compute, 0);
	} else if (argc > 1 && !strcmp(argv[1], "new-stack")) {
		prepare();
		start("wait-stack", wait_new_stack, 1);
		start("end-stack", end_fault, 0);
	} else {
		prepare();
		start("wait-sleep", wait_sleep, 1);
		start("wait-poll", wait_poll, 1);
		start("wait-select", wait_select, 1);
		start("wait-epoll", wait_epoll, 1);
		start("wait-futex", wait_futex, 1);
		start("end-futex", end_futex, 0);
		start("wait-pipe", wait_pipe, 1);
		start("end-pipe", end_pipe, 0);
		start("wait-socket", wait_socket, 1);
		start("end-socket", end_socket, 0);
		start("wait-accept", wait_accept, 1);
		start("end-accept", end_accept, 0);
		start("wait-child", wait_child, 1);
		start("wait-fault", wait_fault, 1);
		start("end-fault", end_fault, 0);
	}
	printf("ready {");
	for (int i = 0; i < worker_count; i++) {
		while (!atomic_load(&workers[i].tid))
			sched_yield();
		printf("%s\"%s\":%d", i ? "," : "", workers[i].name, atomic_load(&workers[i].tid));
	}
	if (atomic_load(&settled))
		printf(",\"slept\":%d", atomic_load(&settled) == 1);
	if (served >= 0)
		printf("\"served\":%d", served);
	printf("}\n");
	fflush(stdout);
	if (argc > 1 && !strcmp(argv[1], "first-ended")) {
		pthread_t other;
		check(pthread_create(&other, NULL, await_stop, NULL), "pthread_create");
		pthread_exit(NULL);
	}
	await_stop(NULL);
}
