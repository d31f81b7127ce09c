// Functions of which nothing says how to leave them: written by hand, without call frame information, without a frame pointer of their own, beginning
// where no compiler lets a function begin, and they never return. Each has a thread; some compute, one sleeps.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define UNCHARTED(name, body)                                                                                           \
	void name(void);                                                                                                \
	__asm__(".text\n.p2align 4\n.skip 24, 0x06\n.type " #name ", @function\n" #name ":\n" body ".size " #name ", . - " #name "\n")

// The return address is the first word of the stack.
UNCHARTED(bare, "1: incq %rax\njmp 1b\n");
// It is behind words that are no return addresses: a function, the middle of one behind no call, a small number; and one that is behind a call, but from where no
// frame of this stack goes on.
UNCHARTED(framed,
	"pushq %rbx\n"
	"subq $4016, %rsp\n"
	"leaq decoy(%rip), %rax\n"
	"movq %rax, 8(%rsp)\n"
	"incq %rax\n"
	"movq %rax, 2000(%rsp)\n"
	"movq $4097, 16(%rsp)\n"
	"leaq behind_call(%rip), %rax\n"
	"movq %rax, 24(%rsp)\n"
	"xorl %ebp, %ebp\n"
	"1: incq (%rsp)\njmp 1b\n");
// The frame pointer is its caller's, and leads past that.
UNCHARTED(keeping, "subq $40, %rsp\n1: incq (%rsp)\njmp 1b\n");
// It has put its caller's away, and computes with the register.
UNCHARTED(pushing, "pushq %rbp\nsubq $64, %rsp\nxorl %ebp, %ebp\n1: incq %rbp\njmp 1b\n");
// nanosleep(of a thousand seconds), for ever.
UNCHARTED(asleep,
	"subq $24, %rsp\n"
	"movq $1000, (%rsp)\n"
	"movq $0, 8(%rsp)\n"
	"1: movl $35, %eax\n"
	"movq %rsp, %rdi\n"
	"xorl %esi, %esi\n"
	"syscall\n"
	"jmp 1b\n");

// A function with a large frame and a call in it: on a stack that is not this one's, it leads nowhere.
__asm__(".text\n.p2align 4\n.type decoy, @function\ndecoy:\n.cfi_startproc\nsubq $264, %rsp\n.cfi_adjust_cfa_offset 264\n"
	"call puts@PLT\nbehind_call:\naddq $264, %rsp\n.cfi_adjust_cfa_offset -264\nret\n.cfi_endproc\n.size decoy, . - decoy\n");

static atomic_int count;
static int tids[5];

static void begin(int place)
{
	tids[place] = (int)syscall(SYS_gettid);
	atomic_fetch_add(&count, 1);
}

#define CALLS __attribute__((noipa))
#define KEEPS __attribute__((noipa, optimize("no-omit-frame-pointer")))
// What they call does not return, but they do not know it.
CALLS int calls_bare(void) { bare(); return 1; }
CALLS int calls_framed(void) { framed(); return 1; }
KEEPS int calls_keeping(void) { keeping(); return 1; }
KEEPS int calls_pushing(void) { pushing(); return 1; }
CALLS int calls_asleep(void) { asleep(); return 1; }

static int (*const bodies[])(void) = { calls_bare, calls_framed, calls_keeping, calls_pushing, calls_asleep };
static const char *const names[] = { "bare", "framed", "keeping", "pushing", "asleep" };

static void *enter(void *argument)
{
	int place = (int)(long)argument;
	begin(place);
	return (void *)(long)(bodies[place]() + 1);
}

int main(void)
{
	char line[64];
	pthread_t unused;
	for (long place = 0; place < 5; place++)
		if (pthread_create(&unused, NULL, enter, (void *)place))
			return 1;
	while (atomic_load(&count) < 5)
		usleep(1000);
	printf("ready {");
	for (int place = 0; place < 5; place++)
		printf("%s\"%s\":%d", place ? "," : "", names[place], tids[place]);
	printf("}\n");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin) && strcmp(line, "stop\n"))
		;
	printf("truth {}\n");
	fflush(stdout);
	_exit(0);
}
