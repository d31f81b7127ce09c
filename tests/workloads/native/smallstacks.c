// Threads with stacks as small as musl makes them when nobody asks for another size, and how much of those is used.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>

enum { STACK_BYTES = 128 * 1024, MARK = 0xa5, MOST = 64 };

struct work {
	void (*call)(void);
	size_t used;
};

// Marks what of the stack is free, then looks how much of it is not marked any more.
static void *run(void *argument)
{
	struct work *work = argument;
	pthread_attr_t attributes;
	void *stack;
	size_t size;
	if (pthread_getattr_np(pthread_self(), &attributes) || pthread_attr_getstack(&attributes, &stack, &size))
		return 0;
	pthread_attr_destroy(&attributes);
	volatile unsigned char *low = stack;
	// The frame of this function, and what it calls, are above.
	uintptr_t free = (uintptr_t)__builtin_frame_address(0) - 1024 - (uintptr_t)stack;
	for (size_t i = 0; i < free; i++)
		low[i] = MARK;
	work->call();
	size_t untouched = 0;
	while (untouched < free && low[untouched] == MARK)
		untouched++;
	work->used = size - untouched;
	return 0;
}

// Calls `call` on `count` such threads at a time; the bytes of stack that one of them has used at most, 0 if there was none.
size_t on_small_stacks(void (*call)(void), unsigned count)
{
	static struct work works[MOST];
	pthread_t threads[MOST];
	pthread_attr_t attributes;
	if (count > MOST || pthread_attr_init(&attributes) || pthread_attr_setstacksize(&attributes, STACK_BYTES))
		return 0;
	unsigned started = 0;
	for (; started < count; started++) {
		works[started] = (struct work){call, 0};
		if (pthread_create(&threads[started], &attributes, run, &works[started]))
			break;
	}
	size_t most = 0;
	for (unsigned i = 0; i < started; i++) {
		pthread_join(threads[i], 0);
		if (works[i].used > most)
			most = works[i].used;
	}
	pthread_attr_destroy(&attributes);
	return started == count ? most : 0;
}
