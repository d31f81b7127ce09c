//! What the runtime says about code, methods, classes and modules.

use super::guid::{Guid, IMETADATA_IMPORT2};
use super::hresult::{E_FAIL, S_OK};
use super::info::{Info, ok};
use super::metadata::{Metadata, blob};
use super::slot::invoke;
use core::ffi::c_void;
use core::ptr::null_mut;
use profiler_protocol::record::{IlMapList, MAX_IL_MAP};

/// COR_PRF_CODE_INFO: a run of code.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CodeRange {
    /// First address.
    pub(crate) start: usize,
    /// Bytes.
    pub(crate) bytes: usize,
}

/// An array of COR_DEBUG_IL_TO_NATIVE_MAP, as its bytes.
#[repr(C, align(4))]
pub(crate) struct IlMapBytes(pub(crate) [u8; MAX_IL_MAP * IlMapList::ENTRY_BYTES]);

/// What a FunctionID stands for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FunctionInfo {
    /// The class, 0 where the runtime does not say.
    pub(crate) class: usize,
    /// The module.
    pub(crate) module: usize,
    /// MethodDef token.
    pub(crate) token: u32,
    /// Type arguments of the method.
    pub(crate) arguments: Arguments,
}

/// What a ModuleID stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModuleInfo {
    /// Where its image is mapped, 0 for none.
    pub(crate) base: usize,
    /// Its assembly.
    pub(crate) assembly: usize,
    /// Whether it can be unloaded.
    pub(crate) collectible: bool,
    /// Whether `base` is that of the file's content, as an array of bytes has it: no code is in
    /// there, and what is behind its end is somebody else's.
    pub(crate) flat: bool,
}

/// What a ClassID stands for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ClassInfo {
    /// The module.
    pub(crate) module: usize,
    /// TypeDef token.
    pub(crate) token: u32,
    /// Type arguments, of all enclosing types together.
    pub(crate) arguments: Arguments,
}

/// Type arguments that are asked for, of all levels of a nested type together. The largest the
/// framework has are the 17 of `Func`.
const MOST_ARGUMENTS: usize = 32;

/// Type arguments: ClassIDs. More than fit are told as the count only.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Arguments {
    ids: [usize; MOST_ARGUMENTS],
    count: u32,
}

impl Arguments {
    /// The ClassIDs.
    #[must_use]
    pub(crate) fn ids(&self) -> &[usize] {
        self.ids.get(..self.count as usize).unwrap_or(&self.ids)
    }
}

impl Info {
    /// The function whose code is at `address`, and which of its rejitted versions.
    ///
    /// # Errors
    /// The runtime's refusal: not managed code, or gone.
    pub(crate) fn function_at(self, address: usize) -> Result<(usize, usize), i32> {
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
    pub(crate) fn is_dynamic(self, function: usize) -> bool {
        let mut dynamic = 0i32;
        let answer = invoke!(self.pointer, 87, (usize, *mut i32), function, &raw mut dynamic);
        answer == S_OK && dynamic != 0
    }

    /// A dynamic method's module and name; the signature is handed to `use_it`.
    ///
    /// # Errors
    /// The runtime's refusal.
    pub(crate) fn dynamic_function(
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
        Ok((module, unsafe { blob(signature, bytes) }))
    }

    /// Class, module, token and type arguments of a function.
    ///
    /// # Errors
    /// The runtime's refusal.
    pub(crate) fn function(self, function: usize) -> Result<FunctionInfo, i32> {
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
    pub(crate) fn class(self, class: usize) -> Result<ClassInfo, i32> {
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
    pub(crate) fn array(self, class: usize) -> Option<(u32, usize, u32)> {
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
    pub(crate) fn module(self, module: usize, name: &mut [u16; 512]) -> Option<ModuleInfo> {
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
    pub(crate) fn assembly(self, assembly: usize, name: &mut [u16; 512]) -> bool {
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
    pub(crate) fn metadata(self, module: usize) -> Option<Metadata> {
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
    pub(crate) fn bodies(self, function: usize, rejit: usize, starts: &mut [usize; 32]) -> usize {
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

    /// Which IL the code of the body that begins at `start` comes from. Answers the bytes of the
    /// map: 0 where the runtime does not say (its debugger is off, the method is dynamic). The
    /// runtime keeps what it has unpacked, so each body is to be asked about once.
    #[must_use]
    pub(crate) fn il_map(self, start: usize, map: &mut IlMapBytes) -> usize {
        let mut count = 0u32;
        let answer = invoke!(
            self.pointer,
            91,
            (usize, u32, *mut u32, *mut u8),
            start,
            MAX_IL_MAP as u32,
            &raw mut count,
            map.0.as_mut_ptr()
        );
        let count = if answer == S_OK { (count as usize).min(MAX_IL_MAP) } else { 0 };
        count.wrapping_mul(IlMapList::ENTRY_BYTES)
    }

    /// The runs of one body, hot part first.
    #[must_use]
    pub(crate) fn code(self, start: usize, ranges: &mut [CodeRange; 8]) -> usize {
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
