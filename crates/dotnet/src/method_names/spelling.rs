//! Names of types and parameters, spelled as the shim spells them
//! (`profiler-shim/src/type_name.rs`), so that a method has one name, whoever told it.

use super::layout::RuntimeLayout;
use super::modules::{KnownModule, KnownModules};
use super::name_text::{NameText, as_given};
use super::paged_memory::PagedMemory;
use super::signature::{arity, without_namespace, word};
use super::types::TypeShape;
use crate::metadata::Assembly;
use profiler_protocol::signature::{SignatureReader, element, simple};
use std::cell::RefCell;
use std::sync::Arc;

/// Types within types, and types around types, deeper than this are cut.
const DEPTH: u32 = 8;
/// Most parameters, type arguments and bounds that are written or passed over.
const MOST_PARAMETERS: u32 = 256;
const MOST_PARTS: u32 = 64;

/// How a type is written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// Before a method's name: with namespace, no C# words (`System.Int32.Parse`).
    Declaring,
    /// As a type argument: with namespace, C# words.
    Argument,
    /// As a parameter: without namespace, C# words.
    Parameter,
}

/// Type arguments in force.
#[derive(Clone, Copy)]
pub(super) struct Scope<'a> {
    /// Of the module that tokens are of.
    pub(super) metadata: Option<&'a Assembly<'a>>,
    pub(super) class: &'a [u64],
    pub(super) method: &'a [u64],
}

/// Writes the names of types of one runtime.
pub(super) struct TypeWriter<'a> {
    pub(super) memory: &'a PagedMemory<'a>,
    pub(super) layout: &'a RuntimeLayout,
    pub(super) modules: &'a RefCell<KnownModules>,
}

impl TypeWriter<'_> {
    /// The module at this address.
    pub(super) fn module(&self, address: u64) -> Option<Arc<KnownModule>> {
        self.modules.borrow_mut().get(self.memory, &self.layout.module, address)
    }

    fn shape(&self, handle: u64) -> Option<TypeShape> {
        self.layout.types.shape(self.memory, handle)
    }

    fn handle(&self, out: &mut NameText, handle: u64, style: Style, depth: u32) {
        if depth > DEPTH || out.was_cut() {
            out.push('…');
            return;
        }
        match self.shape(handle) {
            Some(TypeShape::Array { element, rank }) => {
                match self.shape(element) {
                    Some(TypeShape::Constructed { element_type: element::PTR }) => {
                        out.push_str("?*");
                    }
                    Some(TypeShape::Constructed { element_type: element::FNPTR }) => {
                        out.push_str("delegate*");
                    }
                    _ => self.handle(out, element, style, depth + 1),
                }
                push_rank(out, rank);
            }
            Some(TypeShape::Class { module, token, arguments }) => {
                let module = self.module(module);
                match module.as_ref().and_then(|module| module.assembly()) {
                    Some(metadata) => {
                        self.type_def(out, &metadata, (token, &arguments), style, depth);
                    }
                    None => out.push('?'),
                }
            }
            Some(TypeShape::Constructed { .. }) | None => out.push('?'),
        }
    }

    /// `Namespace.Outer<A>.Inner<B>`: arguments are listed for all levels together, outermost
    /// first.
    pub(super) fn type_def(
        &self,
        out: &mut NameText,
        metadata: &Assembly<'_>,
        (token, arguments): (u32, &[u64]),
        style: Style,
        depth: u32,
    ) {
        let (mut chain, mut at) = (vec![token], token);
        while chain.len() < DEPTH as usize
            && metadata.type_def(at).is_some_and(|(_, is_nested)| is_nested)
            && let Some(outer) = metadata.enclosing(at)
        {
            chain.push(outer);
            at = outer;
        }
        let (levels, mut used) = (chain.len(), 0usize);
        for (index, token) in chain.into_iter().rev().enumerate() {
            let Some((name, _)) = metadata.type_def(token) else {
                out.push('?');
                return;
            };
            let full = as_given(&name);
            if index > 0 {
                out.push('.');
            } else if let Some(word) =
                word(full).filter(|_| levels == 1 && style != Style::Declaring)
            {
                out.push_str(word);
                return;
            }
            let (full, count) = arity(full);
            let is_short = index == 0 && style == Style::Parameter;
            out.push_str(if is_short { without_namespace(full) } else { full });
            // Arguments are those of all enclosing types: each level adds its own.
            let own = arguments.get(used..).unwrap_or_default();
            if count > 0 && own.is_empty() {
                push_canon(out, count);
            } else {
                self.arguments(out, own.get(..count).unwrap_or(own), style, depth);
            }
            used = used.saturating_add(count);
        }
    }

    /// `<A, B>`; nothing where there are none.
    pub(super) fn arguments(
        &self,
        out: &mut NameText,
        arguments: &[u64],
        style: Style,
        depth: u32,
    ) {
        if arguments.is_empty() {
            return;
        }
        let style = if style == Style::Declaring { Style::Argument } else { style };
        for (index, &argument) in arguments.iter().enumerate() {
            out.push_str(if index == 0 { "<" } else { ", " });
            self.handle(out, argument, style, depth + 1);
        }
        out.push('>');
    }

    /// `(int, List<string>)` from a method's signature (II.23.2.1). A malformed one ends in `…`.
    pub(super) fn parameters(&self, out: &mut NameText, scope: Scope<'_>, signature: &[u8]) {
        const GENERIC: u8 = 0x10;
        out.push('(');
        let mut blob = SignatureReader(signature);
        let header = (|| {
            if blob.byte()? & GENERIC != 0 {
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
        for index in 0..count.min(MOST_PARAMETERS) {
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
        if depth > DEPTH || out.was_cut() {
            return None;
        }
        let deeper = depth + 1;
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
                    for _ in 0..blob.number()?.min(MOST_PARTS) {
                        blob.number()?;
                    }
                }
                push_rank(out, rank);
            }
            element::CLASS | element::VALUETYPE => {
                let token = blob.token()?;
                self.token(out, scope, token, deeper);
            }
            element::VAR => self.type_parameter(out, scope.class, blob.number()?, deeper),
            element::MVAR => self.type_parameter(out, scope.method, blob.number()?, deeper),
            element::GENERICINST => {
                blob.byte()?;
                let token = blob.token()?;
                self.token(out, scope, token, deeper);
                for index in 0..blob.number()?.min(MOST_PARTS) {
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
                for _ in 0..blob.number()?.min(MOST_PARAMETERS) + 1 {
                    self.signature_type(out, scope, blob, deeper)?;
                }
                out.back_to(before);
                out.push_str("delegate*");
            }
            element::INTERNAL => {
                let handle = blob.pointer()?;
                self.handle(out, handle, Style::Parameter, deeper);
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
        let (name, outer) = match token >> 24 {
            0x01 => metadata.type_ref(token).unwrap_or_default(),
            0x02 => match metadata.type_def(token) {
                Some((name, true)) => (name, metadata.enclosing(token)),
                found => (found.unwrap_or_default().0, None),
            },
            0x1b => {
                let mut blob = SignatureReader(metadata.type_spec(token).unwrap_or_default());
                if self.signature_type(out, scope, &mut blob, depth + 1).is_none() {
                    out.push('?');
                }
                return;
            }
            _ => Default::default(),
        };
        if let Some(outer) = outer {
            self.token(out, scope, outer, depth + 1);
            out.push('.');
        }
        let full = as_given(&name);
        match word(full) {
            Some(word) => out.push_str(word),
            None => out.push_str(without_namespace(arity(full).0)),
        }
    }

    fn type_parameter(&self, out: &mut NameText, arguments: &[u64], number: u32, depth: u32) {
        match arguments.get(number as usize) {
            Some(&handle) => self.handle(out, handle, Style::Parameter, depth),
            // Code that instantiations share.
            None => out.push_str("__Canon"),
        }
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
