//! Addresses and ClassIDs → names, on the service thread, inside the gate. Names are raw: what the
//! compiler made of async methods and lambdas (`<Load>d__3.MoveNext`) is made readable by the
//! daemon.

use crate::com::hresult::E_FAIL;
use crate::com::info::{CodeRange, Info};
use crate::com::metadata::{Metadata, NameBuffer};
use crate::signature::{SignatureReader, arity, element, simple, without_namespace, word};
use crate::syscall;
use crate::text::BoundedText;
use core::cell::Cell;
use profiler_protocol::record::NOT_NOW;

/// A name in the making; a record takes 2,048 bytes.
pub type NameText = BoundedText<2_040>;

/// Types within types, and types around types, deeper than this are cut.
const DEPTH: u32 = 8;
/// Where the types are that everybody makes instances of: `List<T>` and the like.
const CORE_LIBRARY: &str = "System.Private.CoreLib.dll";

/// How a type is written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Style {
    /// Before a method's name: with namespace, no C# words (`System.Int32.Parse`).
    Declaring,
    /// As a type argument or an allocated type: with namespace, C# words.
    Argument,
    /// As a parameter: without namespace, C# words.
    Parameter,
}

/// Type arguments in force.
#[derive(Clone, Copy)]
struct Scope<'a> {
    metadata: Option<&'a Metadata>,
    class: &'a [usize],
    method: &'a [usize],
}

/// A method body, named.
pub struct NamedMethod {
    /// Full name.
    pub name: NameText,
    /// Module's simple file name.
    pub module: NameText,
    /// ModuleID.
    pub module_id: usize,
    /// MethodDef token; 0 for dynamic methods.
    pub token: u32,
    /// True for dynamic methods.
    pub dynamic: bool,
    /// True when its code can never be unloaded, and neither can what shares its code heap.
    pub lasting: bool,
    /// Code of the body that was asked about.
    pub ranges: [CodeRange; 8],
    /// How many of them.
    pub range_count: usize,
}

/// Names things for one runtime.
pub struct Namer {
    info: Info,
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
    pub fn new(info: Info) -> Self {
        Self { info, owners: Owners::default() }
    }

    /// The method whose code is at `address`.
    ///
    /// # Errors
    /// The runtime's HRESULT: no managed code there (any more).
    pub fn method(&self, address: usize, out: &mut NamedMethod) -> Result<(), i32> {
        let (function, rejit) = self.info.function_at(address)?;
        out.name.clear();
        out.module.clear();
        out.module_id = 0;
        out.token = 0;
        out.lasting = false;
        out.dynamic = self.info.is_dynamic(function);
        if out.dynamic {
            self.dynamic_method(function, out)?;
        } else {
            self.plain_method(function, out)?;
        }
        out.range_count = self.body_of(address, function, rejit, &mut out.ranges);
        Ok(())
    }

    fn dynamic_method(&self, function: usize, out: &mut NamedMethod) -> Result<(), i32> {
        let mut name: NameBuffer = [0; 512];
        let (module, signature) = self.info.dynamic_function(function, &mut name)?;
        out.name.push_utf16(&name);
        let scope = Scope { metadata: None, class: &[], method: &[] };
        self.parameters(&mut out.name, scope, signature);
        out.module_id = module;
        self.module_name(module, &mut out.module);
        Ok(())
    }

    fn plain_method(&self, function: usize, out: &mut NamedMethod) -> Result<(), i32> {
        let found = self.info.function(function)?;
        out.module_id = found.module;
        out.token = found.token;
        let collectible = self.module_name(found.module, &mut out.module);
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
        self.type_def(&mut out.name, &metadata, type_token, arguments, Style::Declaring);
        out.name.push('.');
        out.name.push_utf16(&name);
        let scope =
            Scope { metadata: Some(&metadata), class: arguments, method: found.arguments.ids() };
        self.arguments(&mut out.name, scope.method, Style::Argument, 0);
        self.parameters(&mut out.name, scope, signature);
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
    pub fn lasting_images(&self, mut each: impl FnMut(usize, usize)) {
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

    /// The simple file name of a module; the assembly's name when it has no file. True when it can
    /// be unloaded (or may).
    fn module_name(&self, module: usize, out: &mut NameText) -> bool {
        let mut name: NameBuffer = [0; 512];
        let Some(found) = self.info.module(module, &mut name) else { return true };
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
        found.collectible
    }

    /// A class as a type argument or an allocated type is written, its module and that one's
    /// ModuleID (0: the runtime does not say). `None` when it does not know the class.
    pub fn class(&self, class: usize, name: &mut NameText, module: &mut NameText) -> Option<usize> {
        let module_id = self.home(class, module, 0);
        self.class_id(name, class, Style::Argument, 0);
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

    fn class_id(&self, out: &mut NameText, class: usize, style: Style, depth: u32) {
        if depth > DEPTH || out.was_cut() {
            out.push('…');
            return;
        }
        if let Some((kind, inner, rank)) = self.info.array(class) {
            // The kind of an array of enums is that of their numbers. Pointers have no class that
            // the runtime tells of.
            let is_class =
                inner != 0 && (self.info.array(inner).is_some() || self.info.class(inner).is_ok());
            let word = match u8::try_from(kind).ok().filter(|_| !is_class) {
                Some(element::PTR) => Some("?*"),
                Some(element::FNPTR) => Some("delegate*"),
                kind => kind.and_then(simple),
            };
            match word {
                Some(word) => out.push_str(word),
                None => self.class_id(out, inner, style, depth.wrapping_add(1)),
            }
            push_rank(out, rank);
            return;
        }
        let Ok(found) = self.info.class(class) else {
            out.push('?');
            return;
        };
        match self.info.metadata(found.module) {
            Some(metadata) => {
                self.type_def_at(out, &metadata, found.token, found.arguments.ids(), style, depth);
            }
            None => out.push('?'),
        }
    }

    fn type_def(
        &self,
        out: &mut NameText,
        metadata: &Metadata,
        token: u32,
        arguments: &[usize],
        style: Style,
    ) {
        self.type_def_at(out, metadata, token, arguments, style, 0);
    }

    /// `Namespace.Outer<A>.Inner<B>`: arguments are listed for all levels together, outermost
    /// first.
    fn type_def_at(
        &self,
        out: &mut NameText,
        metadata: &Metadata,
        token: u32,
        arguments: &[usize],
        style: Style,
        depth: u32,
    ) {
        let mut chain = [0u32; DEPTH as usize];
        let (mut levels, mut at) = (0usize, token);
        let mut name: NameBuffer = [0; 512];
        while let Some(place) = chain.get_mut(levels) {
            *place = at;
            levels = levels.wrapping_add(1);
            match metadata.type_def(at, &mut name) {
                Some(true) => match metadata.enclosing(at) {
                    Some(outer) => at = outer,
                    None => break,
                },
                _ => break,
            }
        }
        let mut used = 0usize;
        for (index, token) in chain.iter().take(levels).rev().enumerate() {
            if metadata.type_def(*token, &mut name).is_none() {
                out.push('?');
                return;
            }
            let end = name.iter().position(|u| *u == 0).unwrap_or(name.len());
            let full = name.get(..end).unwrap_or(&[]);
            if index == 0 {
                if let Some(word) = word(full).filter(|_| levels == 1 && style != Style::Declaring)
                {
                    out.push_str(word);
                    return;
                }
            } else {
                out.push('.');
            }
            let (full, count) = arity(full);
            out.push_utf16(if index == 0 && style == Style::Parameter {
                without_namespace(full)
            } else {
                full
            });
            // Arguments are those of all enclosing types: each level adds its own.
            let own = arguments.get(used..).unwrap_or(&[]);
            if count > 0 && own.is_empty() {
                push_canon(out, count);
            } else {
                self.arguments(out, own.get(..count).unwrap_or(own), style, depth);
            }
            used = used.saturating_add(count);
        }
    }

    fn arguments(&self, out: &mut NameText, arguments: &[usize], style: Style, depth: u32) {
        if arguments.is_empty() {
            return;
        }
        let style = if style == Style::Declaring { Style::Argument } else { style };
        for (index, argument) in arguments.iter().enumerate() {
            out.push_str(if index == 0 { "<" } else { ", " });
            self.class_id(out, *argument, style, depth.wrapping_add(1));
        }
        out.push('>');
    }

    /// `(int, List<string>)` from a method's signature (II.23.2.1). A malformed one ends in `…`.
    fn parameters(&self, out: &mut NameText, scope: Scope<'_>, signature: &[u8]) {
        const GENERIC: u8 = 0x10;
        out.push('(');
        let mut blob = SignatureReader(signature);
        let header = (|| {
            let convention = blob.byte()?;
            if convention & GENERIC != 0 {
                blob.number()?;
            }
            blob.number()
        })();
        // The return type is passed over by writing it and taking it back.
        let before = out.mark();
        let whole = header.is_some() && self.signature_type(out, scope, &mut blob, 0).is_some();
        out.back_to(before);
        if !whole {
            out.push('…');
        }
        let count = if whole { header.unwrap_or(0) } else { 0 };
        for index in 0..count.min(256) {
            if index > 0 {
                out.push_str(", ");
            }
            if out.was_cut() || self.signature_type(out, scope, &mut blob, 0).is_none() {
                out.push('…');
                break;
            }
        }
        out.push(')');
    }

    fn signature_type(
        &self,
        out: &mut NameText,
        scope: Scope<'_>,
        blob: &mut SignatureReader<'_>,
        depth: u32,
    ) -> Option<()> {
        // What does not fit need not be looked up: a signature in 64 KiB can ask for very much.
        if depth > DEPTH || out.was_cut() {
            return None;
        }
        let deeper = depth.wrapping_add(1);
        match blob.byte()? {
            element::CMOD_OPT | element::CMOD_REQD => {
                blob.token()?;
                self.signature_type(out, scope, blob, deeper)?;
            }
            element::SENTINEL | element::PINNED => self.signature_type(out, scope, blob, deeper)?,
            element::BYREF => {
                out.push_str("ref ");
                self.signature_type(out, scope, blob, deeper)?;
            }
            element::PTR => {
                self.signature_type(out, scope, blob, deeper)?;
                out.push('*');
            }
            element::SZARRAY => {
                self.signature_type(out, scope, blob, deeper)?;
                out.push_str("[]");
            }
            element::ARRAY => {
                self.signature_type(out, scope, blob, deeper)?;
                let rank = blob.number()?;
                for _ in 0..2 {
                    // Sizes, then lower bounds.
                    for _ in 0..blob.number()?.min(64) {
                        blob.number()?;
                    }
                }
                push_rank(out, rank);
            }
            element::CLASS | element::VALUETYPE => {
                let token = blob.token()?;
                self.token(out, scope, token, deeper);
            }
            element::VAR => type_parameter(self, out, scope.class, blob.number()?, deeper),
            element::MVAR => type_parameter(self, out, scope.method, blob.number()?, deeper),
            element::GENERICINST => {
                blob.byte()?;
                let token = blob.token()?;
                self.token(out, scope, token, deeper);
                for index in 0..blob.number()?.min(64) {
                    out.push_str(if index == 0 { "<" } else { ", " });
                    self.signature_type(out, scope, blob, deeper)?;
                }
                out.push('>');
            }
            element::FNPTR => {
                // The pointed-to signature is passed over.
                let before = out.mark();
                if blob.byte()? & 0x10 != 0 {
                    blob.number()?;
                }
                for _ in 0..blob.number()?.min(256).saturating_add(1) {
                    self.signature_type(out, scope, blob, deeper)?;
                }
                out.back_to(before);
                out.push_str("delegate*");
            }
            element::INTERNAL => {
                let class = usize::try_from(blob.pointer()?).ok()?;
                self.class_id(out, class, Style::Parameter, deeper);
            }
            other => out.push_str(simple(other)?),
        }
        Some(())
    }

    /// A type by its token, without namespace and without type arguments (a signature lists those
    /// after it).
    fn token(&self, out: &mut NameText, scope: Scope<'_>, token: u32, depth: u32) {
        let Some(metadata) = scope.metadata.filter(|_| depth <= DEPTH) else {
            out.push('?');
            return;
        };
        let mut name: NameBuffer = [0; 512];
        let outer = match token >> 24 {
            0x01 => match metadata.type_ref(token, &mut name) {
                Some(outer) => (outer >> 24 == 0x01).then_some(outer),
                None => None,
            },
            0x02 => match metadata.type_def(token, &mut name) {
                Some(true) => metadata.enclosing(token),
                _ => None,
            },
            0x1b => {
                let mut blob = SignatureReader(metadata.type_spec(token));
                if self.signature_type(out, scope, &mut blob, depth.wrapping_add(1)).is_none() {
                    out.push('?');
                }
                return;
            }
            _ => None,
        };
        if let Some(outer) = outer {
            self.token(out, scope, outer, depth.wrapping_add(1));
            out.push('.');
        }
        let end = name.iter().position(|u| *u == 0).unwrap_or(name.len());
        let full = name.get(..end).unwrap_or(&[]);
        match word(full) {
            Some(word) => out.push_str(word),
            None => out.push_utf16(without_namespace(arity(full).0)),
        }
    }
}

fn type_parameter(namer: &Namer, out: &mut NameText, arguments: &[usize], number: u32, depth: u32) {
    match arguments.get(number as usize) {
        Some(class) => namer.class_id(out, *class, Style::Parameter, depth),
        // Shared code (see `plain_method`).
        None => out.push_str("__Canon"),
    }
}

fn push_rank(out: &mut NameText, rank: u32) {
    out.push('[');
    for _ in 1..rank.min(32) {
        out.push(',');
    }
    out.push(']');
}

fn push_canon(out: &mut NameText, count: usize) {
    for index in 0..count {
        out.push_str(if index == 0 { "<" } else { ", " });
        out.push_str("__Canon");
    }
    out.push('>');
}

/// All code of a function, as (start, bytes) words in `bytes`: for a method that goes away.
pub fn code_of(info: Info, function: usize, bytes: &mut [u8; 256]) -> &[u8] {
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
    pub const fn new() -> Self {
        Self {
            name: NameText::new(),
            module: NameText::new(),
            module_id: 0,
            token: 0,
            dynamic: false,
            lasting: false,
            ranges: [CodeRange { start: 0, bytes: 0 }; 8],
            range_count: 0,
        }
    }
}

impl Default for NamedMethod {
    fn default() -> Self {
        Self::new()
    }
}
