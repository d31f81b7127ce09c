//! What std would bring: the memory functions the compiler calls, and a panic handler that must not
//! be reachable. Only in the cdylib. Hidden symbols: nothing outside the library binds to them.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

// Names no library defines: when a panic path survives optimisation, `cargo xtask` finds it among
// the undefined symbols.
unsafe extern "C" {
    fn perfusion_shim_has_a_panic_path() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: never runs: the build refuses a library that refers to this symbol.
    unsafe { perfusion_shim_has_a_panic_path() }
}
