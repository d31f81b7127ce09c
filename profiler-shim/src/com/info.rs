//! Calls into the runtime: ICorProfilerInfo12 to 15, by slot. The interfaces extend one another, so
//! the newest pointer serves all slots of the older ones; slots newer than 12 are guarded by the
//! interface's number.

use super::guid::{Guid, IMETADATA_IMPORT2, INFOS};
use super::hresult::{E_FAIL, S_OK};
use super::metadata::Metadata;
use super::slot::invoke;
use crate::exact::RuntimeHeap;
use crate::exact::holders::Objects;
use crate::live::Handles;
use crate::repeat::mix;
use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::AtomicU64;
use profiler_protocol::load::{LOCK_PATH_BYTES, LOCK_VARIABLE, OWNER_VARIABLE, owner_in_variable};

/// The runtime's interface. Held from Initialize until the object goes; calls are safe as long as
/// the instance lives.
#[derive(Clone, Copy)]
pub struct Info {
    pointer: *mut c_void,
    level: u32,
}

/// COR_PRF_MONITOR flags, low and high word.
#[derive(Clone, Copy)]
pub struct Mask {
    low: u32,
    high: u32,
}

impl Mask {
    /// MODULE_LOADS (for unloads), THREADS; DYNAMIC_FUNCTION_UNLOADS, BASIC_GC, EVENT_PIPE. All may
    /// be set after an attach and by a notification-only profiler.
    pub const OURS: Self = Self { low: 0x4 | 0x200, high: 0x4 | 0x10 | 0x80 };
    /// The same, and LARGEOBJECT_ALLOCATED, for which the same is true.
    pub const OURS_AND_LARGE: Self = Self { low: Self::OURS.low, high: Self::OURS.high | 0x40 };
    /// For a main profiler at the start of the process: all of ours, for its guest
    /// (`com/exact.rs`), GC, OBJECT_ALLOCATED and what that needs (ENABLE_OBJECT_ALLOCATED),
    /// SUSPENDS. GC turns background collections off for good (vm/profilinghelper.cpp).
    pub const EXACT: Self =
        Self { low: Self::EXACT_WITHOUT_GC.low | 0x80, high: Self::EXACT_WITHOUT_GC.high };
    /// The same while nobody needs to hear of survivors.
    pub const EXACT_WITHOUT_GC: Self =
        Self { low: Self::OURS.low | 0x100 | 0x80_0000 | 0x1_0000, high: Self::OURS.high };
    /// No callbacks.
    pub const NONE: Self = Self { low: 0, high: 0 };
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
pub enum Provider {
    /// `Microsoft-Windows-DotNETRuntime`.
    Runtime,
    /// `System.Runtime`, whose events tell the values of the runtime's counters.
    Counters,
    /// Another one.
    Other,
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

/// COR_PRF_CODE_INFO: a run of code.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodeRange {
    /// First address.
    pub start: usize,
    /// Bytes.
    pub bytes: usize,
}

/// What a FunctionID stands for.
#[derive(Clone, Copy, Debug, Default)]
pub struct FunctionInfo {
    /// The class, 0 where the runtime does not say.
    pub class: usize,
    /// The module.
    pub module: usize,
    /// MethodDef token.
    pub token: u32,
    /// Type arguments of the method.
    pub arguments: Arguments,
}

/// What a ModuleID stands for.
#[derive(Clone, Copy, Debug)]
pub struct ModuleInfo {
    /// Where its image is mapped, 0 for none.
    pub base: usize,
    /// Its assembly.
    pub assembly: usize,
    /// Whether it can be unloaded.
    pub collectible: bool,
    /// Whether `base` is that of the file's content, as an array of bytes has it: no code is in
    /// there, and what is behind its end is somebody else's.
    pub flat: bool,
}

/// What a ClassID stands for.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClassInfo {
    /// The module.
    pub module: usize,
    /// TypeDef token.
    pub token: u32,
    /// Type arguments, of all enclosing types together.
    pub arguments: Arguments,
}

/// Type arguments that are asked for, of all levels of a nested type together. The largest the
/// framework has are the 17 of `Func`.
const MOST_ARGUMENTS: usize = 32;

/// Type arguments: ClassIDs. More than fit are told as the count only.
#[derive(Clone, Copy, Debug, Default)]
pub struct Arguments {
    ids: [usize; MOST_ARGUMENTS],
    count: u32,
}

impl Arguments {
    /// The ClassIDs.
    #[must_use]
    pub fn ids(&self) -> &[usize] {
        self.ids.get(..self.count as usize).unwrap_or(&self.ids)
    }
}

/// Room for what a variable of the environment says.
const VARIABLE_BYTES: usize = LOCK_PATH_BYTES + 2;

impl Info {
    /// The newest interface the runtime has, from the one it passes to Initialize; `None` below
    /// Info12 (.NET 5).
    ///
    /// # Safety
    /// `unknown` is a live interface pointer or null.
    pub unsafe fn query(unknown: *mut c_void) -> Option<Self> {
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

    /// What [`Info::address`] and [`Info::level`] gave; `None` for 0.
    pub(crate) fn from_address(address: usize, level: u32) -> Option<Self> {
        let pointer = core::ptr::with_exposed_provenance_mut::<c_void>(address);
        (!pointer.is_null()).then_some(Self { pointer, level })
    }

    pub(crate) fn address(self) -> usize {
        self.pointer.expose_provenance()
    }

    pub(crate) fn level(self) -> u32 {
        self.level
    }

    /// True from .NET 7 on.
    #[must_use]
    pub fn has_handles(self) -> bool {
        self.level >= 13
    }

    /// Gives the interface up.
    pub fn release(self) {
        invoke!(self.pointer, 2, ());
    }

    /// Runtime version (major, minor, build) and the CLR's instance id; zeroes where it does not
    /// say.
    #[must_use]
    pub fn runtime(self) -> (u16, u16, u16, u16) {
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
    pub fn owner_in_environment(self) -> u64 {
        let mut bytes = [0; VARIABLE_BYTES];
        owner_in_variable(self.variable(OWNER_VARIABLE, &mut bytes))
    }

    /// The path in [`LOCK_VARIABLE`], for a system call; empty without one.
    pub fn lock_in_environment(self, bytes: &mut [u8; VARIABLE_BYTES]) -> &core::ffi::CStr {
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
    pub fn set_mask(self, mask: Mask) -> Result<(), i32> {
        ok(invoke!(self.pointer, 82, (u32, u32), mask.low, mask.high))
    }

    /// Starts a session on the runtime's provider, and if asked on that of its counters, which are
    /// then told once a second.
    ///
    /// # Errors
    /// The runtime's refusal.
    pub fn start_session(self, keywords: u64, level: u32, with_counters: bool) -> Result<u64, i32> {
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
    pub fn stop_session(self, session: u64) -> Result<(), i32> {
        ok(invoke!(self.pointer, 103, (u64), session))
    }

    /// Which provider it is; `None` where the runtime does not say.
    #[must_use]
    pub fn provider(self, provider: usize) -> Option<Provider> {
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
    pub fn request_detach(self, wait_ms: u32) -> Result<(), i32> {
        ok(invoke!(self.pointer, 58, (u32), wait_ms))
    }

    /// The OS id of a managed thread, if it has one.
    #[must_use]
    pub fn os_thread(self, thread: usize) -> Option<u32> {
        let mut os_thread = 0u32;
        let answer = invoke!(self.pointer, 12, (usize, *mut u32), thread, &raw mut os_thread);
        (answer == S_OK && os_thread != 0).then_some(os_thread)
    }

    /// Calls `each` for every object in the heap, while the world stands still. False: the runtime
    /// refuses, or cannot (before .NET 9).
    #[must_use]
    pub fn each_object<F: FnMut(usize)>(self, mut each: F) -> bool {
        type Callback = extern "C" fn(usize, *mut c_void) -> i32;
        let state = (&raw mut each).cast::<c_void>();
        self.level >= 15
            && invoke!(self.pointer, 114, (Callback, *mut c_void), hand_on::<F>, state) == S_OK
    }

    /// Calls `each` for every managed thread, at most 4096.
    pub fn each_thread(self, each: impl FnMut(usize)) {
        let mut list = null_mut::<c_void>();
        let answer = invoke!(self.pointer, 71, (*mut *mut c_void), &raw mut list);
        if answer == S_OK && !list.is_null() {
            each_of(list, each);
        }
    }

    /// Calls `each` for every loaded module, at most 4096.
    pub fn each_module(self, each: impl FnMut(usize)) {
        let mut list = null_mut::<c_void>();
        let answer = invoke!(self.pointer, 66, (*mut *mut c_void), &raw mut list);
        if answer == S_OK && !list.is_null() {
            each_of(list, each);
        }
    }

    /// The function whose code is at `address`, and which of its rejitted versions.
    ///
    /// # Errors
    /// The runtime's refusal: not managed code, or gone.
    pub fn function_at(self, address: usize) -> Result<(usize, usize), i32> {
        let (mut function, mut rejit) = (0usize, 0usize);
        let answer = invoke!(
            self.pointer,
            88,
            (usize, *mut usize, *mut usize),
            address,
            &raw mut function,
            &raw mut rejit
        );
        ok(answer)?;
        if function == 0 { Err(E_FAIL) } else { Ok((function, rejit)) }
    }

    /// True for methods made by Reflection.Emit's DynamicMethod and the runtime's own stubs.
    #[must_use]
    pub fn is_dynamic(self, function: usize) -> bool {
        let mut dynamic = 0i32;
        let answer = invoke!(self.pointer, 87, (usize, *mut i32), function, &raw mut dynamic);
        answer == S_OK && dynamic != 0
    }

    /// A dynamic method's module and name; the signature is handed to `use_it`.
    ///
    /// # Errors
    /// The runtime's refusal.
    pub fn dynamic_function(
        self,
        function: usize,
        name: &mut [u16; 512],
    ) -> Result<(usize, &'static [u8]), i32> {
        let (mut module, mut signature, mut bytes, mut needed) =
            (0usize, core::ptr::null::<u8>(), 0u32, 0u32);
        let answer = invoke!(
            self.pointer,
            89,
            (usize, *mut usize, *mut *const u8, *mut u32, u32, *mut u32, *mut u16),
            function,
            &raw mut module,
            &raw mut signature,
            &raw mut bytes,
            512,
            &raw mut needed,
            name.as_mut_ptr()
        );
        ok(answer)?;
        // SAFETY: the runtime's own copy of the signature, which lives as long as the method; the
        // gate keeps it for this look-up.
        Ok((module, unsafe { super::metadata::blob(signature, bytes) }))
    }

    /// Class, module, token and type arguments of a function.
    ///
    /// # Errors
    /// The runtime's refusal.
    pub fn function(self, function: usize) -> Result<FunctionInfo, i32> {
        let mut found = FunctionInfo::default();
        let mut count = 0u32;
        let answer = invoke!(
            self.pointer,
            38,
            (usize, usize, *mut usize, *mut usize, *mut u32, u32, *mut u32, *mut usize),
            function,
            0,
            &raw mut found.class,
            &raw mut found.module,
            &raw mut found.token,
            MOST_ARGUMENTS as u32,
            &raw mut count,
            found.arguments.ids.as_mut_ptr()
        );
        ok(answer)?;
        found.arguments.count = count.min(MOST_ARGUMENTS as u32);
        Ok(found)
    }

    /// Module, token and type arguments of a class.
    ///
    /// # Errors
    /// The runtime's refusal; 0x80131366 for what is no class (pointers, by-refs, function
    /// pointers).
    pub fn class(self, class: usize) -> Result<ClassInfo, i32> {
        let mut found = ClassInfo::default();
        let (mut parent, mut count) = (0usize, 0u32);
        let answer = invoke!(
            self.pointer,
            41,
            (usize, *mut usize, *mut u32, *mut usize, u32, *mut u32, *mut usize),
            class,
            &raw mut found.module,
            &raw mut found.token,
            &raw mut parent,
            MOST_ARGUMENTS as u32,
            &raw mut count,
            found.arguments.ids.as_mut_ptr()
        );
        ok(answer)?;
        found.arguments.count = count.min(MOST_ARGUMENTS as u32);
        Ok(found)
    }

    /// An array class: (element type code, element class, rank); `None` for other classes.
    #[must_use]
    pub fn array(self, class: usize) -> Option<(u32, usize, u32)> {
        let (mut kind, mut element, mut rank) = (0u32, 0usize, 0u32);
        let answer = invoke!(
            self.pointer,
            11,
            (usize, *mut u32, *mut usize, *mut u32),
            class,
            &raw mut kind,
            &raw mut element,
            &raw mut rank
        );
        (answer == S_OK).then_some((kind, element, rank))
    }

    /// A module; its path as UTF-16 in `name`.
    #[must_use]
    pub fn module(self, module: usize, name: &mut [u16; 512]) -> Option<ModuleInfo> {
        const COR_PRF_MODULE_COLLECTIBLE: u32 = 8;
        const COR_PRF_MODULE_FLAT_LAYOUT: u32 = 0x20;
        let (mut base, mut needed, mut assembly, mut flags) = (0usize, 0u32, 0usize, 0u32);
        let answer = invoke!(
            self.pointer,
            70,
            (usize, *mut usize, u32, *mut u32, *mut u16, *mut usize, *mut u32),
            module,
            &raw mut base,
            512,
            &raw mut needed,
            name.as_mut_ptr(),
            &raw mut assembly,
            &raw mut flags
        );
        let is = |flag: u32| flags & flag != 0;
        let (collectible, flat) = (is(COR_PRF_MODULE_COLLECTIBLE), is(COR_PRF_MODULE_FLAT_LAYOUT));
        (answer == S_OK).then_some(ModuleInfo { base, assembly, collectible, flat })
    }

    /// An assembly's simple name, as UTF-16 in `name`.
    #[must_use]
    pub fn assembly(self, assembly: usize, name: &mut [u16; 512]) -> bool {
        let (mut needed, mut domain, mut module) = (0u32, 0usize, 0usize);
        let answer = invoke!(
            self.pointer,
            26,
            (usize, u32, *mut u32, *mut u16, *mut usize, *mut usize),
            assembly,
            512,
            &raw mut needed,
            name.as_mut_ptr(),
            &raw mut domain,
            &raw mut module
        );
        answer == S_OK
    }

    /// A module's metadata.
    #[must_use]
    pub fn metadata(self, module: usize) -> Option<Metadata> {
        let mut pointer = null_mut::<c_void>();
        let answer = invoke!(
            self.pointer,
            21,
            (usize, u32, *const Guid, *mut *mut c_void),
            module,
            0,
            &IMETADATA_IMPORT2,
            &raw mut pointer
        );
        // SAFETY: an IMetaDataImport2 that is ours to release.
        (answer == S_OK && !pointer.is_null()).then(|| unsafe { Metadata::new(pointer) })
    }

    /// First addresses of a function's code bodies.
    #[must_use]
    pub fn bodies(self, function: usize, rejit: usize, starts: &mut [usize; 32]) -> usize {
        let mut count = 0u32;
        let answer = invoke!(
            self.pointer,
            90,
            (usize, usize, u32, *mut u32, *mut usize),
            function,
            rejit,
            32,
            &raw mut count,
            starts.as_mut_ptr()
        );
        if answer == S_OK { (count as usize).min(32) } else { 0 }
    }

    /// The runs of one body, hot part first.
    #[must_use]
    pub fn code(self, start: usize, ranges: &mut [CodeRange; 8]) -> usize {
        let mut count = 0u32;
        let answer = invoke!(
            self.pointer,
            92,
            (usize, u32, *mut u32, *mut CodeRange),
            start,
            8,
            &raw mut count,
            ranges.as_mut_ptr()
        );
        if answer == S_OK { (count as usize).min(8) } else { 0 }
    }
}

impl Objects for Info {
    #[inline]
    fn class_of(&self, object: usize) -> Option<usize> {
        let mut class = 0usize;
        let answer = invoke!(self.pointer, 3, (usize, *mut usize), object, &raw mut class);
        (answer == S_OK).then_some(class)
    }
}

impl RuntimeHeap for Info {
    fn size(&self, object: usize) -> Option<u64> {
        let mut bytes = 0usize;
        let answer = invoke!(self.pointer, 80, (usize, *mut usize), object, &raw mut bytes);
        (answer == S_OK && bytes != 0).then_some(bytes as u64)
    }

    fn is_frozen(&self, object: usize) -> bool {
        let mut frozen = 0i32;
        let answer = invoke!(self.pointer, 94, (usize, *mut i32), object, &raw mut frozen);
        answer == S_OK && frozen != 0
    }

    fn generations(&self, to: &[AtomicU64]) -> usize {
        let most = u32::try_from(to.len() / 4).unwrap_or(0);
        let mut count = 0u32;
        // COR_PRF_GC_GENERATION_RANGE: generation (4 bytes and 4 of padding), first address, bytes,
        // bytes reserved.
        let answer = invoke!(
            self.pointer,
            54,
            (u32, *mut u32, *mut AtomicU64),
            most,
            &raw mut count,
            to.as_ptr().cast_mut()
        );
        if answer == S_OK { count.min(most) as usize } else { 0 }
    }

    fn identity(&self, class: usize) -> (u64, bool) {
        if let Some((kind, inner, rank)) = self.array(class) {
            return (mix(mix(inner as u64) ^ u64::from(kind) << 32 ^ u64::from(rank)) | 1, true);
        }
        let Ok(found) = self.class(class) else { return (1, true) };
        let mut identity = mix(found.module as u64 ^ u64::from(found.token) << 40);
        for argument in found.arguments.ids() {
            identity = mix(identity ^ *argument as u64);
        }
        (identity | 1, false)
    }

    #[inline]
    fn word(&self, address: usize) -> u64 {
        // SAFETY: the first two words of an object, or the first of its method table; the caller
        // says that nothing can free them now.
        unsafe { core::ptr::with_exposed_provenance::<u64>(address).read() }
    }
}

extern "C" fn hand_on<F: FnMut(usize)>(object: usize, each: *mut c_void) -> i32 {
    // SAFETY: `Info::each_object` passes its own closure, which lives until the runtime has gone
    // through all, and nobody else uses meanwhile.
    unsafe { (*each.cast::<F>())(object) };
    // TRUE: go on.
    1
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

fn ok(answer: i32) -> Result<(), i32> {
    if answer >= 0 { Ok(()) } else { Err(answer) }
}

impl Handles for Info {
    fn create(&self, address: usize) -> Option<usize> {
        let mut handle = 0usize;
        // 1: COR_PRF_HANDLE_TYPE_WEAK.
        let answer =
            invoke!(self.pointer, 108, (usize, u32, *mut usize), address, 1, &raw mut handle);
        (answer == S_OK && handle != 0).then_some(handle)
    }

    fn destroy(&self, handle: usize) {
        invoke!(self.pointer, 109, (usize), handle);
    }

    fn object(&self, handle: usize) -> Option<usize> {
        let mut object = 0usize;
        let answer = invoke!(self.pointer, 110, (usize, *mut usize), handle, &raw mut object);
        (answer == S_OK).then_some(object)
    }

    fn generation(&self, object: usize) -> Option<u8> {
        /// COR_PRF_GC_GENERATION_RANGE.
        #[repr(C)]
        #[derive(Default)]
        struct GenerationRange {
            generation: u32,
            start: usize,
            bytes: usize,
            reserved: usize,
        }
        let mut range = GenerationRange::default();
        let answer =
            invoke!(self.pointer, 55, (usize, *mut GenerationRange), object, &raw mut range);
        (answer == S_OK).then_some(range.generation.min(4) as u8)
    }
}
