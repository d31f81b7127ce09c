//! Names of types, from classes and from signatures.

use crate::runtime::info::Info;
use crate::runtime::metadata::{Metadata, NameBuffer};
use crate::signature::{arity, without_namespace, word};
use crate::text::BoundedText;
use profiler_protocol::signature::{SignatureReader, element, simple};

/// A name in the making; a record takes 2,048 bytes.
pub(crate) type NameText = BoundedText<2_040>;

/// Types within types, and types around types, deeper than this are cut.
pub(crate) const DEPTH: u32 = 8;

/// How a type is written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// Before a method's name: with namespace, no C# words (`System.Int32.Parse`).
    Declaring,
    /// As a type argument or an allocated type: with namespace, C# words.
    Argument,
    /// As a parameter: without namespace, C# words.
    Parameter,
}

/// Type arguments in force.
#[derive(Clone, Copy)]
pub(crate) struct Scope<'a> {
    pub(crate) metadata: Option<&'a Metadata>,
    pub(crate) class: &'a [usize],
    pub(crate) method: &'a [usize],
}

/// Writes the names of types of one runtime.
pub(crate) struct TypeNamer {
    pub(crate) info: Info,
}

impl TypeNamer {
    pub(crate) fn class_id(&self, out: &mut NameText, class: usize, style: Style, depth: u32) {
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

    pub(crate) fn type_def(
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
    pub(crate) fn type_def_at(
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

    pub(crate) fn arguments(
        &self,
        out: &mut NameText,
        arguments: &[usize],
        style: Style,
        depth: u32,
    ) {
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
    pub(crate) fn parameters(&self, out: &mut NameText, scope: Scope<'_>, signature: &[u8]) {
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

    pub(crate) fn signature_type(
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
    pub(crate) fn token(&self, out: &mut NameText, scope: Scope<'_>, token: u32, depth: u32) {
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

fn type_parameter(
    namer: &TypeNamer,
    out: &mut NameText,
    arguments: &[usize],
    number: u32,
    depth: u32,
) {
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
