//! What std would bring: the memory functions the compiler calls, and a panic handler that must not be reachable.
//! Only in the cdylib. Hidden symbols: nothing outside the library binds to them.

use core::arch::global_asm;

// System V ABI. `rep movsb` and `rep stosb` need nothing but the direction flag clear, which the ABI guarantees at calls.
global_asm!(
    ".hidden memcpy",
    ".globl memcpy",
    ".type memcpy,@function",
    "memcpy:",
    "    mov rax, rdi",
    "    mov rcx, rdx",
    "    rep movsb",
    "    ret",
    ".size memcpy, .-memcpy",
    ".hidden memmove",
    ".globl memmove",
    ".type memmove,@function",
    "memmove:",
    "    mov rax, rdi",
    "    mov rcx, rdx",
    "    mov r8, rdi",
    "    sub r8, rsi",
    "    cmp r8, rdx",
    "    jb 2f",
    "    rep movsb",
    "    ret",
    "2:  lea rdi, [rdi + rdx - 1]",
    "    lea rsi, [rsi + rdx - 1]",
    "    std",
    "    rep movsb",
    "    cld",
    "    ret",
    ".size memmove, .-memmove",
    ".hidden memset",
    ".globl memset",
    ".type memset,@function",
    "memset:",
    "    mov r8, rdi",
    "    mov eax, esi",
    "    mov rcx, rdx",
    "    rep stosb",
    "    mov rax, r8",
    "    ret",
    ".size memset, .-memset",
    ".hidden memcmp",
    ".globl memcmp",
    ".type memcmp,@function",
    ".hidden bcmp",
    ".globl bcmp",
    ".type bcmp,@function",
    "memcmp:",
    "bcmp:",
    "    xor eax, eax",
    "    mov rcx, rdx",
    "    test rcx, rcx",
    "    je 3f",
    "    repe cmpsb",
    "    movzx eax, byte ptr [rdi - 1]",
    "    movzx ecx, byte ptr [rsi - 1]",
    "    sub ecx, eax",
    "    mov eax, ecx",
    "3:  ret",
    ".size memcmp, .-memcmp",
    ".size bcmp, .-bcmp",
);

// Names no library defines: when a panic path survives optimisation, `cargo xtask` finds it among the undefined symbols.
unsafe extern "C" {
    fn perfusion_shim_has_a_panic_path() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: never runs: the build refuses a library that refers to this symbol.
    unsafe { perfusion_shim_has_a_panic_path() }
}
