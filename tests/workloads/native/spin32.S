/* A 32-bit process without any library: sleeps 10 ms for ever. A recorder must name it, not fail on it.
 * Assembler and linker of binutils are enough: no 32-bit C library needs to be installed. */
    .code32
    .text
    .globl _start
_start:
    movl $162, %eax        /* nanosleep(&interval, 0), i386 system call table */
    movl $interval, %ebx
    xorl %ecx, %ecx
    int  $0x80
    jmp  _start

    .data
interval:
    .long 0, 10000000      /* seconds, nanoseconds */
    .section .note.GNU-stack,"",@progbits
