//! Addresses and ClassIDs → names, on the service thread, inside the gate. Names are raw: what the
//! compiler made of async methods and lambdas (`<Load>d__3.MoveNext`) is made readable by the
//! daemon.

use crate::runtime::describe::{CodeRange, IlMapBytes};
use crate::runtime::hresult::E_FAIL;
use crate::runtime::info::Info;
use crate::runtime::metadata::NameBuffer;
use crate::syscall;
use crate::type_name::{DEPTH, NameText, Scope, Style, TypeNamer};
use core::cell::Cell;
use profiler_protocol::record::{IlMapList, MAX_IL_MAP, NOT_NOW};

/// Where the types are that everybody makes instances of: `List<T>` and the like.
const CORE_LIBRARY: &str = "System.Private.CoreLib.dll";

/// A method body, named.
pub(crate) struct NamedMethod {
    /// Full name.
    pub(crate) name: NameText,
    /// Module's simple file name.
    pub(crate) module: NameText,
    /// ModuleID.
    pub(crate) module_id: usize,
    /// MethodDef token; 0 for dynamic methods.
    pub(crate) token: u32,
    /// True for dynamic methods.
    pub(crate) dynamic: bool,
    /// True when its code can never be unloaded, and neither can what shares its code heap.
    pub(crate) lasting: bool,
    /// Code of the body that was asked about.
    pub(crate) ranges: [CodeRange; 8],
    /// How many of them.
    pub(crate) range_count: usize,
    /// Where its module is mapped.
    pub(crate) base: usize,
    /// Which IL that code comes from.
    pub(crate) il_map: IlMapBytes,
    /// Bytes of that.
    pub(crate) il_map_bytes: usize,
}

/// Names things for one runtime.
pub(crate) struct Namer {
    info: Info,
    types: TypeNamer,
    owners: Owners,
}

/// Finds the class of code that several instantiations share. .NET 8 and 9 answer 0 for it, yet
/// `Dictionary<string, int>` and `Dictionary<string, long>` are different code. A FunctionID is the
/// address of a MethodDesc, whose third byte counts 8-byte steps back to its chunk; the 24 bytes
/// before those begin with the MethodTable, which is the ClassID (dotnet/runtime
/// src/coreclr/vm/method.hpp, `MethodDesc` and `MethodDescChunk`, the same on 8, 9 and 10). That is
/// the runtime's own business, so it is believed only while it has agreed with every class the
/// runtime did tell.
#[derive(Default)]
struct Owners {
    agreed: Cell<u32>,
    disagreed: Cell<u32>,
}

impl Owners {
    const CHUNK_HEADER: usize = 24;

    fn read(function: usize) -> Option<usize> {
        let steps = syscall::read_word(function)? >> 16 & 0xff;
        let chunk = function
            .checked_sub((steps as usize).wrapping_mul(8).wrapping_add(Self::CHUNK_HEADER))?;
        usize::try_from(syscall::read_word(chunk)?).ok()
    }

    /// The class of `function`, of which the runtime said `told` (0: nothing); 0 when it cannot be
    /// known.
    ///
    /// # Errors
    /// [`NOT_NOW`] while the runtime has told no class to compare with.
    fn class_of(&self, function: usize, told: usize) -> Result<usize, i32> {
        let found = Self::read(function).unwrap_or(0);
        if told != 0 {
            let word = if found == told { &self.agreed } else { &self.disagreed };
            word.set(word.get().saturating_add(1));
            return Ok(told);
        }
        match (self.agreed.get(), self.disagreed.get()) {
            (0, 0) => Err(NOT_NOW),
            (_, 0) => Ok(found),
            _ => Ok(0),
        }
    }
}

impl Namer {
    /// For this runtime.
    #[must_use]
    pub(crate) fn new(info: Info) -> Self {
        Self { info, types: TypeNamer { info }, owners: Owners::default() }
    }

    /// The method whose code is at `address`; `with_il`: and which IL that comes from.
    ///
    /// # Errors
    /// The runtime's HRESULT: no managed code there (any more).
    pub(crate) fn method(
        &self,
        address: usize,
        with_il: bool,
        out: &mut NamedMethod,
    ) -> Result<(), i32> {
        let (function, rejit) = self.info.function_at(address)?;
        out.name.clear();
        out.module.clear();
        out.module_id = 0;
        out.token = 0;
        out.lasting = false;
        out.base = 0;
        out.il_map_bytes = 0;
        out.dynamic = self.info.is_dynamic(function);
        if out.dynamic {
            self.dynamic_method(function, out)?;
        } else {
            self.plain_method(function, out)?;
        }
        out.range_count = self.body_of(address, function, rejit, &mut out.ranges);
        // Without a file there are no lines.
        if with_il && out.base != 0 && out.range_count != 0 {
            out.il_map_bytes = self.info.il_map(out.ranges[0].start, &mut out.il_map);
        }
        Ok(())
    }

    fn dynamic_method(&self, function: usize, out: &mut NamedMethod) -> Result<(), i32> {
        let mut name: NameBuffer = [0; 512];
        let (module, signature) = self.info.dynamic_function(function, &mut name)?;
        out.name.push_utf16(&name);
        let scope = Scope { metadata: None, class: &[], method: &[] };
        self.types.parameters(&mut out.name, scope, signature);
        out.module_id = module;
        self.module_name(module, &mut out.module);
        Ok(())
    }

    fn plain_method(&self, function: usize, out: &mut NamedMethod) -> Result<(), i32> {
        let found = self.info.function(function)?;
        out.module_id = found.module;
        out.token = found.token;
        let collectible;
        (collectible, out.base) = self.module_name(found.module, &mut out.module);
        // A body without a name is no answer.
        let Some(metadata) = self.info.metadata(found.module) else { return Err(E_FAIL) };
        let mut name: NameBuffer = [0; 512];
        let Some((type_token, signature)) = metadata.method(found.token, &mut name) else {
            return Err(E_FAIL);
        };
        let class = match self.owners.class_of(function, found.class)? {
            0 => None,
            class => self
                .info
                .class(class)
                .ok()
                .filter(|c| c.module == found.module && c.token == type_token),
        };
        let arguments = class.as_ref().map_or(&[][..], |c| c.arguments.ids());
        // Code of an instantiation lives with the shortest-lived of its type arguments.
        let plain = class.is_some() && arguments.is_empty() && found.arguments.ids().is_empty();
        out.lasting = plain && !collectible;
        self.types.type_def(&mut out.name, &metadata, type_token, arguments, Style::Declaring);
        out.name.push('.');
        out.name.push_utf16(&name);
        let scope =
            Scope { metadata: Some(&metadata), class: arguments, method: found.arguments.ids() };
        self.types.arguments(&mut out.name, scope.method, Style::Argument, 0);
        self.types.parameters(&mut out.name, scope, signature);
        Ok(())
    }

    /// The runs of the body that holds `address`; a method has one body per tier.
    fn body_of(
        &self,
        address: usize,
        function: usize,
        rejit: usize,
        ranges: &mut [CodeRange; 8],
    ) -> usize {
        let mut starts = [0usize; 32];
        let bodies = self.info.bodies(function, rejit, &mut starts);
        // What is compiled ahead for a P/Invoke is no version of the method and in no list; the
        // runtime looks up code by any of its addresses, not by the first alone
        // (vm/proftoeeinterfaceimpl.cpp, `GetCodeInfoFromCodeStart`).
        for start in starts.iter().take(bodies).chain([&address]) {
            let count = self.info.code(*start, ranges);
            let holds =
                |r: &CodeRange| address >= r.start && address.wrapping_sub(r.start) < r.bytes;
            if ranges.iter().take(count).any(holds) {
                return count;
            }
        }
        0
    }

    /// Calls `each` with the place of every image that is never unloaded: (base, bytes). Its
    /// ReadyToRun code is in there.
    pub(crate) fn lasting_images(&self, mut each: impl FnMut(usize, usize)) {
        self.info.each_module(|module| {
            let mut name: NameBuffer = [0; 512];
            let module = self.info.module(module, &mut name);
            let Some(found) = module.filter(|m| m.base != 0 && !m.collectible && !m.flat) else {
                return;
            };
            // PE format: e_lfanew at 0x3c, SizeOfImage 0x50 bytes behind the signature it points
            // to.
            let half = |address: usize| {
                let word = syscall::read_word(address & !7)?;
                Some((if address & 4 == 0 { word } else { word >> 32 }) as u32 as usize)
            };
            let size = half(found.base.wrapping_add(0x3c))
                .and_then(|header| half(found.base.wrapping_add(header).wrapping_add(0x50)));
            if let Some(bytes) = size {
                each(found.base, bytes);
            }
        });
    }

    /// The simple file name of a module; the assembly's name when it has no file. Answers whether
    /// it can be unloaded (or may), and where it is mapped.
    fn module_name(&self, module: usize, out: &mut NameText) -> (bool, usize) {
        let mut name: NameBuffer = [0; 512];
        let Some(found) = self.info.module(module, &mut name) else { return (true, 0) };
        let end = name.iter().position(|u| *u == 0).unwrap_or(name.len());
        let path = name.get(..end).unwrap_or(&[]);
        let file = path
            .iter()
            .rposition(|u| *u == u16::from(b'/'))
            .map_or(0, |slash| slash.wrapping_add(1));
        out.push_utf16(path.get(file..).unwrap_or(&[]));
        if out.is_empty() && self.info.assembly(found.assembly, &mut name) {
            out.push_utf16(&name);
        }
        (found.collectible, found.base)
    }

    /// A class as a type argument or an allocated type is written, its module and that one's
    /// ModuleID (0: the runtime does not say). `None` when it does not know the class.
    pub(crate) fn class(
        &self,
        class: usize,
        name: &mut NameText,
        module: &mut NameText,
    ) -> Option<usize> {
        let module_id = self.home(class, module, 0);
        self.types.class_id(name, class, Style::Argument, 0);
        (!name.is_empty()).then_some(module_id)
    }

    /// The module that tells a class from another one of its name: its own; of a generic one of the
    /// core library that of its first argument that is of another module, if there is one.
    fn home(&self, class: usize, module: &mut NameText, depth: u32) -> usize {
        let mut element = class;
        for _ in 0..DEPTH {
            match self.info.array(element) {
                Some((_, inner, _)) if inner != 0 => element = inner,
                _ => break,
            }
        }
        let Ok(found) = self.info.class(element) else { return 0 };
        let before = module.mark();
        self.module_name(found.module, module);
        if depth >= DEPTH || module.as_str() != CORE_LIBRARY {
            return found.module;
        }
        for argument in found.arguments.ids() {
            module.back_to(before);
            let of_argument = self.home(*argument, module, depth.wrapping_add(1));
            if of_argument != 0 && module.as_str() != CORE_LIBRARY {
                return of_argument;
            }
        }
        module.back_to(before);
        self.module_name(found.module, module);
        found.module
    }
}

/// All code of a function, as (start, bytes) words in `bytes`: for a method that goes away.
pub(crate) fn code_of(info: Info, function: usize, bytes: &mut [u8; 256]) -> &[u8] {
    let mut starts = [0usize; 32];
    let bodies = info.bodies(function, 0, &mut starts);
    let mut used = 0usize;
    for start in starts.iter().take(bodies) {
        let mut ranges = [CodeRange::default(); 8];
        let count = info.code(*start, &mut ranges);
        for range in ranges.iter().take(count) {
            let Some(room) = bytes.get_mut(used..used.wrapping_add(16)) else { break };
            let words = [range.start as u64, range.bytes as u64];
            for (to, from) in room.iter_mut().zip(words.into_iter().flat_map(u64::to_le_bytes)) {
                *to = from;
            }
            used = used.wrapping_add(16);
        }
    }
    bytes.get(..used).unwrap_or(&[])
}

impl NamedMethod {
    /// Nothing yet.
    #[must_use]
    pub(crate) const fn new() -> Self {
        Self {
            name: NameText::new(),
            module: NameText::new(),
            module_id: 0,
            token: 0,
            dynamic: false,
            lasting: false,
            ranges: [CodeRange { start: 0, bytes: 0 }; 8],
            range_count: 0,
            base: 0,
            il_map: IlMapBytes([0; MAX_IL_MAP * IlMapList::ENTRY_BYTES]),
            il_map_bytes: 0,
        }
    }
}

impl Default for NamedMethod {
    fn default() -> Self {
        Self::new()
    }
}
