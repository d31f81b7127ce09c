//! Calls into the runtime: ICorProfilerInfo12 to 15, by slot. The interfaces extend one another, so
//! the newest pointer serves all slots of the older ones; slots newer than 12 are guarded by the
//! interface's number.

use super::guid::{Guid, INFOS};
use super::hresult::{E_FAIL, S_OK};
use super::slot::invoke;
use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use profiler_protocol::load::{LOCK_PATH_BYTES, LOCK_VARIABLE, OWNER_VARIABLE, owner_in_variable};

/// The runtime's interface. Held from Initialize until the object goes; calls are safe as long as
/// the instance lives.
#[derive(Clone, Copy)]
pub(crate) struct Info {
    pub(super) pointer: *mut c_void,
    pub(super) level: u32,
}

/// Where an [`Info`] is kept once there is one: the runtime may call on any thread.
pub(crate) struct InfoCell {
    address: AtomicUsize,
    level: AtomicU32,
}

impl InfoCell {
    /// Without one.
    pub(crate) const fn new() -> Self {
        Self { address: AtomicUsize::new(0), level: AtomicU32::new(0) }
    }

    /// Keeps it; once, before anything asks for it.
    pub(crate) fn set(&self, info: Info) {
        self.level.store(info.level, Ordering::Relaxed);
        // Release: pairs with the acquire in `get`; the level is set before.
        self.address.store(info.pointer.expose_provenance(), Ordering::Release);
    }

    /// The one that is kept.
    pub(crate) fn get(&self) -> Option<Info> {
        let address = self.address.load(Ordering::Acquire);
        let pointer = core::ptr::with_exposed_provenance_mut::<c_void>(address);
        let level = self.level.load(Ordering::Relaxed);
        (!pointer.is_null()).then_some(Info { pointer, level })
    }
}

/// COR_PRF_MONITOR flags, low and high word.
#[derive(Clone, Copy)]
pub(crate) struct Mask {
    low: u32,
    high: u32,
}

impl Mask {
    /// MODULE_LOADS (for unloads), THREADS; DYNAMIC_FUNCTION_UNLOADS, BASIC_GC, EVENT_PIPE. All may
    /// be set after an attach and by a notification-only profiler.
    pub(crate) const OURS: Self = Self { low: 0x4 | 0x200, high: 0x4 | 0x10 | 0x80 };
    /// The same, and LARGEOBJECT_ALLOCATED, for which the same is true.
    pub(crate) const OURS_AND_LARGE: Self =
        Self { low: Self::OURS.low, high: Self::OURS.high | 0x40 };
    /// For a main profiler at the start of the process: all of ours, for its guest
    /// (`com/exact.rs`), GC, OBJECT_ALLOCATED and what that needs (ENABLE_OBJECT_ALLOCATED),
    /// SUSPENDS. GC turns background collections off for good (vm/profilinghelper.cpp).
    pub(crate) const EXACT: Self =
        Self { low: Self::EXACT_WITHOUT_GC.low | 0x80, high: Self::EXACT_WITHOUT_GC.high };
    /// The same while nobody needs to hear of survivors.
    pub(crate) const EXACT_WITHOUT_GC: Self =
        Self { low: Self::OURS.low | 0x100 | 0x80_0000 | 0x1_0000, high: Self::OURS.high };
    /// No callbacks.
    pub(crate) const NONE: Self = Self { low: 0, high: 0 };
}

/// COR_PRF_EVENTPIPE_PROVIDER_CONFIG.
#[repr(C)]
struct ProviderConfig {
    name: *const u16,
    keywords: u64,
    level: u32,
    filter: *const u16,
}

/// A provider, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Provider {
    /// `Microsoft-Windows-DotNETRuntime`.
    Runtime,
    /// `System.Runtime`, whose events tell the values of the runtime's counters.
    Counters,
    /// Another one.
    Other,
}

/// Handles of providers, once told apart: the runtime's, its counters', and the last other one.
pub(crate) struct ProviderCache {
    runtime: AtomicUsize,
    counters: AtomicUsize,
    other: AtomicUsize,
}

impl ProviderCache {
    /// None is known.
    pub(crate) const fn new() -> Self {
        Self {
            runtime: AtomicUsize::new(0),
            counters: AtomicUsize::new(0),
            other: AtomicUsize::new(0),
        }
    }

    /// Which provider that is. The runtime is asked once for each, in the callback, where it
    /// answers.
    pub(crate) fn kind(&self, provider: usize, info: &InfoCell) -> Provider {
        let known = [
            (&self.runtime, Provider::Runtime),
            (&self.counters, Provider::Counters),
            (&self.other, Provider::Other),
        ];
        // Relaxed: each word is a fact by itself.
        if let Some((_, of)) =
            known.iter().find(|(known, _)| known.load(Ordering::Relaxed) == provider)
        {
            return *of;
        }
        let Some(of) = info.get().and_then(|info| info.provider(provider)) else {
            return Provider::Other;
        };
        for (word, _) in known.iter().filter(|(_, kind)| *kind == of) {
            word.store(provider, Ordering::Relaxed);
        }
        of
    }
}

const RUNTIME_PROVIDER: [u16; 32] = units(b"Microsoft-Windows-DotNETRuntime");
const COUNTERS_PROVIDER: [u16; 15] = units(b"System.Runtime");
/// `CounterGroup` of System.Private.CoreLib has no counters read without a number of seconds in
/// this argument.
const EACH_SECOND: [u16; 26] = units(b"EventCounterIntervalSec=1");

/// An ASCII text and zeros behind it.
const fn units<const N: usize>(text: &[u8]) -> [u16; N] {
    let mut units = [0u16; N];
    let mut at = 0;
    while at < text.len() {
        units[at] = text[at] as u16;
        at += 1;
    }
    units
}

/// Room for what a variable of the environment says.
const VARIABLE_BYTES: usize = LOCK_PATH_BYTES + 2;

impl Info {
    /// The newest interface the runtime has, from the one it passes to Initialize; `None` below
    /// Info12 (.NET 5).
    ///
    /// # Safety
    /// `unknown` is a live interface pointer or null.
    pub(crate) unsafe fn query(unknown: *mut c_void) -> Option<Self> {
        if unknown.is_null() {
            return None;
        }
        for (guid, level) in &INFOS {
            let mut pointer = null_mut();
            let answer =
                invoke!(unknown, 0, (*const Guid, *mut *mut c_void), guid, &raw mut pointer);
            if answer == S_OK && !pointer.is_null() {
                return Some(Self { pointer, level: *level });
            }
        }
        None
    }

    /// True from .NET 7 on.
    #[must_use]
    pub(crate) fn has_handles(self) -> bool {
        self.level >= 13
    }

    /// Gives the interface up.
    pub(crate) fn release(self) {
        invoke!(self.pointer, 2, ());
    }

    /// Runtime version (major, minor, build) and the CLR's instance id; zeroes where it does not
    /// say.
    #[must_use]
    pub(crate) fn runtime(self) -> (u16, u16, u16, u16) {
        let (mut clr, mut major, mut minor, mut build, mut qfe) = (0u16, 0u16, 0u16, 0u16, 0u16);
        let (mut kind, mut needed) = (0u32, 0u32);
        invoke!(
            self.pointer,
            67,
            (*mut u16, *mut u32, *mut u16, *mut u16, *mut u16, *mut u16, u32, *mut u32, *mut u16),
            &raw mut clr,
            &raw mut kind,
            &raw mut major,
            &raw mut minor,
            &raw mut build,
            &raw mut qfe,
            0,
            &raw mut needed,
            null_mut()
        );
        (major, minor, build, clr)
    }

    /// The owner the environment names, 0 for none. Asked of the runtime (Info11): there is no libc
    /// here to ask.
    #[must_use]
    pub(crate) fn owner_in_environment(self) -> u64 {
        let mut bytes = [0; VARIABLE_BYTES];
        owner_in_variable(self.variable(OWNER_VARIABLE, &mut bytes))
    }

    /// The path in [`LOCK_VARIABLE`], for a system call; empty without one.
    pub(crate) fn lock_in_environment(self, bytes: &mut [u8; VARIABLE_BYTES]) -> &core::ffi::CStr {
        self.variable(LOCK_VARIABLE, bytes);
        core::ffi::CStr::from_bytes_until_nul(bytes).unwrap_or_default()
    }

    /// What a variable of the environment says, of which the runtime has a copy. `bytes` are zeroes
    /// before, and behind it.
    #[inline(never)]
    fn variable<'a>(self, name: &str, bytes: &'a mut [u8; VARIABLE_BYTES]) -> &'a [u8] {
        let mut wide = [0u16; 32];
        for (to, from) in wide.iter_mut().zip(name.bytes()) {
            *to = u16::from(from);
        }
        let (mut value, mut needed) = ([0u16; VARIABLE_BYTES], 0u32);
        let answer = invoke!(
            self.pointer,
            99,
            (*const u16, u32, *mut u32, *mut u16),
            wide.as_ptr(),
            VARIABLE_BYTES as u32,
            &raw mut needed,
            value.as_mut_ptr()
        );
        let mut count = 0usize;
        if answer == S_OK {
            for (to, from) in bytes.iter_mut().zip(value.iter().take_while(|u| **u != 0)) {
                *to = *from as u8;
                count = count.wrapping_add(1);
            }
        }
        bytes.get(..count).unwrap_or(&[])
    }

    /// Says which callbacks we want.
    ///
    /// # Errors
    /// The runtime's refusal.
    pub(crate) fn set_mask(self, mask: Mask) -> Result<(), i32> {
        ok(invoke!(self.pointer, 82, (u32, u32), mask.low, mask.high))
    }

    /// Starts a session on the runtime's provider, and if asked on that of its counters, which are
    /// then told once a second.
    ///
    /// # Errors
    /// The runtime's refusal.
    pub(crate) fn start_session(
        self,
        keywords: u64,
        level: u32,
        with_counters: bool,
    ) -> Result<u64, i32> {
        // Counters belong to no keyword and are told at any level.
        let configs = [
            ProviderConfig {
                name: RUNTIME_PROVIDER.as_ptr(),
                keywords,
                level,
                filter: core::ptr::null(),
            },
            ProviderConfig {
                name: COUNTERS_PROVIDER.as_ptr(),
                keywords: 0,
                level: 1,
                filter: EACH_SECOND.as_ptr(),
            },
        ];
        let mut session = 0u64;
        let answer = invoke!(
            self.pointer,
            101,
            (u32, *const ProviderConfig, i32, *mut u64),
            if with_counters { 2 } else { 1 },
            configs.as_ptr(),
            0,
            &raw mut session
        );
        ok(answer)?;
        if session == 0 { Err(E_FAIL) } else { Ok(session) }
    }

    /// Ends a session.
    ///
    /// # Errors
    /// The runtime's refusal.
    pub(crate) fn stop_session(self, session: u64) -> Result<(), i32> {
        ok(invoke!(self.pointer, 103, (u64), session))
    }

    /// Which provider it is; `None` where the runtime does not say.
    #[must_use]
    pub(crate) fn provider(self, provider: usize) -> Option<Provider> {
        let (mut name, mut needed) = ([0u16; 64], 0u32);
        let answer = invoke!(
            self.pointer,
            105,
            (usize, u32, *mut u32, *mut u16),
            provider,
            64,
            &raw mut needed,
            name.as_mut_ptr()
        );
        (answer == S_OK).then_some(())?;
        Some(match name {
            _ if name.starts_with(&RUNTIME_PROVIDER) => Provider::Runtime,
            _ if name.starts_with(&COUNTERS_PROVIDER) => Provider::Counters,
            _ => Provider::Other,
        })
    }

    /// Asks to be detached; the runtime waits `wait_ms` before it looks whether that is possible.
    ///
    /// # Errors
    /// The runtime's refusal.
    pub(crate) fn request_detach(self, wait_ms: u32) -> Result<(), i32> {
        ok(invoke!(self.pointer, 58, (u32), wait_ms))
    }

    /// The OS id of a managed thread, if it has one.
    #[must_use]
    pub(crate) fn os_thread(self, thread: usize) -> Option<u32> {
        let mut os_thread = 0u32;
        let answer = invoke!(self.pointer, 12, (usize, *mut u32), thread, &raw mut os_thread);
        (answer == S_OK && os_thread != 0).then_some(os_thread)
    }

    /// Calls `each` for every managed thread, at most 4096.
    pub(crate) fn each_thread(self, each: impl FnMut(usize)) {
        let mut list = null_mut::<c_void>();
        let answer = invoke!(self.pointer, 71, (*mut *mut c_void), &raw mut list);
        if answer == S_OK && !list.is_null() {
            each_of(list, each);
        }
    }

    /// Calls `each` for every loaded module, at most 4096.
    pub(crate) fn each_module(self, each: impl FnMut(usize)) {
        let mut list = null_mut::<c_void>();
        let answer = invoke!(self.pointer, 66, (*mut *mut c_void), &raw mut list);
        if answer == S_OK && !list.is_null() {
            each_of(list, each);
        }
    }
}

/// Goes through an ICorProfilerThreadEnum or ICorProfilerModuleEnum (the same slots) and releases
/// it.
fn each_of(list: *mut c_void, mut each: impl FnMut(usize)) {
    for _ in 0..4096 {
        let (mut element, mut fetched) = (0usize, 0u32);
        invoke!(list, 7, (u32, *mut usize, *mut u32), 1, &raw mut element, &raw mut fetched);
        if fetched == 0 {
            break;
        }
        each(element);
    }
    invoke!(list, 2, ());
}

pub(super) fn ok(answer: i32) -> Result<(), i32> {
    if answer >= 0 { Ok(()) } else { Err(answer) }
}
