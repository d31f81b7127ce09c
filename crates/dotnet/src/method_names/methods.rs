//! From a `MethodDesc` to the method's name (dotnet/runtime src/coreclr/vm/method.hpp).

use super::NamedMethod;
use super::NoName;
use super::name_text::{NameText, as_given};
use super::spelling::{Scope, Style, TypeWriter};
use super::types::{TypeShape, handles};
use crate::data_descriptor::RuntimeMemory;

/// Kinds of methods (`MethodClassification`), in the low bits of the flags.
const KIND_BITS: u16 = 7;
const ARRAY: u16 = 4;
const INSTANTIATED: u16 = 5;
const DYNAMIC: u16 = 7;
/// Bits of a token beside its table.
const TOKEN_BITS: u32 = 24;
/// Most bytes of a dynamic method's name and signature.
const MOST_NAME: usize = 2048;
const MOST_SIGNATURE: usize = 1 << 16;

/// What is known of a method before its metadata.
struct MethodHead {
    kind: u16,
    token: u32,
    declaring_type: u64,
}

impl TypeWriter<'_> {
    /// The method with this MethodDesc.
    pub(super) fn method(&self, method: u64) -> Result<NamedMethod, NoName> {
        let head = self.head(method).ok_or(NoName::Inconsistent)?;
        // What is made at run time for an array is of the array's type.
        if head.kind == DYNAMIC {
            let module = self.layout.types.module(self.memory, head.declaring_type);
            let named = module.and_then(|module| self.dynamic(method, module));
            return named.ok_or(NoName::Inconsistent);
        }
        let Some(TypeShape::Class { module, token: class, arguments }) =
            self.layout.types.shape(self.memory, head.declaring_type)
        else {
            return Err(NoName::Inconsistent);
        };
        match head.kind {
            // Made by the runtime without metadata: the shim has no name for them either.
            ARRAY => Err(NoName::NoMetadata),
            kind => {
                let module_read = self.module(module).ok_or(NoName::NoMetadata)?;
                let metadata = module_read.assembly().ok_or(NoName::NoMetadata)?;
                let declared = metadata.method(head.token).ok_or(NoName::NoMetadata)?;
                // Metadata and the runtime must agree on whose method it is.
                if declared.class != class {
                    return Err(NoName::Inconsistent);
                }
                let own = match kind {
                    INSTANTIATED => self.own_arguments(method).ok_or(NoName::Inconsistent)?,
                    _ => Vec::new(),
                };
                let mut out = NameText::default();
                self.type_def(&mut out, &metadata, (class, &arguments), Style::Declaring, 0);
                out.push('.');
                out.push_str(as_given(declared.name));
                let scope = Scope { metadata: Some(&metadata), class: &arguments, method: &own };
                self.arguments(&mut out, &own, Style::Argument, 0);
                self.parameters(&mut out, scope, declared.signature);
                let (name, token) = (out.into_string(), head.token);
                let module_name = module_read.name.clone();
                Ok(NamedMethod { name, module_name, module, token, dynamic: false })
            }
        }
    }

    /// The module of the method with this MethodDesc.
    pub(super) fn module_of(&self, method: u64) -> Option<u64> {
        let head = self.head(method).filter(|head| head.kind != DYNAMIC && head.kind != ARRAY)?;
        match self.layout.types.shape(self.memory, head.declaring_type)? {
            TypeShape::Class { module, .. } => Some(module),
            _ => None,
        }
    }

    /// Reads what is before the metadata, and checks that method and chunk fit together.
    fn head(&self, method: u64) -> Option<MethodHead> {
        let layout = &self.layout.method;
        if method == 0 || !method.is_multiple_of(layout.alignment) {
            return None;
        }
        let short = |at: u64, offset: u64| {
            let mut bytes = [0; 2];
            self.memory.read(at.checked_add(offset)?, &mut bytes)?;
            Some(u16::from_le_bytes(bytes))
        };
        let index = u64::from(short(method, layout.chunk_index)? & 0xff);
        let before = index.checked_mul(layout.alignment)?;
        let chunk = method.checked_sub(before)?.checked_sub(layout.chunk_bytes)?;
        // Its size in steps, less one.
        let steps = u64::from(short(chunk, layout.chunk_size)? & 0xff) + 1;
        if index >= steps {
            return None;
        }
        let bits = layout.remainder_bits;
        let low = |value: u16, bits: u32| u32::from(value) & ((1 << bits) - 1);
        let remainder = low(short(method, layout.token_remainder)?, bits);
        let range = low(short(chunk, layout.chunk_token_range)?, TOKEN_BITS - bits);
        Some(MethodHead {
            kind: short(method, layout.flags)? & KIND_BITS,
            token: 0x0600_0000 | range << bits | remainder,
            declaring_type: self.memory.word(chunk.checked_add(layout.chunk_type)?)?,
        })
    }

    /// Type arguments of a generic method.
    fn own_arguments(&self, method: u64) -> Option<Vec<u64>> {
        let layout = &self.layout.method;
        let count = self.memory.half(method.checked_add(layout.argument_count)?)? & 0xffff;
        // A method of a generic class may be of this kind without arguments of its own.
        match self.memory.word(method.checked_add(layout.arguments)?)? {
            0 => Some(Vec::new()),
            at => handles(self.memory, at, usize::try_from(count).ok()?),
        }
    }

    /// A method that was made at run time: its name and signature are beside it.
    fn dynamic(&self, method: u64, module: u64) -> Option<NamedMethod> {
        let layout = &self.layout.method;
        let word = |at: u64| self.memory.word(method.checked_add(at)?);
        let name = self.text(word(layout.dynamic_name)?)?;
        let bytes = self.memory.half(method.checked_add(layout.signature_bytes)?)?;
        let length = usize::try_from(bytes).ok()?.min(MOST_SIGNATURE);
        let mut signature = vec![0; length];
        self.memory.read(word(layout.signature)?, &mut signature)?;
        let mut out = NameText::default();
        out.push_str(as_given(&name));
        self.parameters(&mut out, Scope { metadata: None, class: &[], method: &[] }, &signature);
        let module_name = self.module(module).map(|module| module.name.clone());
        let module_name = module_name.unwrap_or_default();
        Some(NamedMethod { name: out.into_string(), module_name, module, token: 0, dynamic: true })
    }

    /// UTF-8 with a zero at its end.
    fn text(&self, at: u64) -> Option<String> {
        if at == 0 {
            return None;
        }
        let mut bytes = Vec::new();
        while bytes.len() < MOST_NAME {
            let mut byte = [0; 1];
            self.memory.read(at.checked_add(bytes.len() as u64)?, &mut byte)?;
            match byte {
                [0] => return Some(String::from_utf8_lossy(&bytes).into_owned()),
                [byte] => bytes.push(byte),
            }
        }
        None
    }
}
