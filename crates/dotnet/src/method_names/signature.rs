//! Method signatures (ECMA-335 II.23.2): their element types, and C# words for the simple ones. The
//! words are those of the shim (`profiler-shim/src/signature.rs`).

use crate::fields::PayloadFields;
use crate::metadata::compressed;

/// Element types (ECMA-335 II.23.1.16).
pub(super) mod element {
    /// `T*`
    pub(crate) const PTR: u8 = 0x0f;
    /// `ref T`
    pub(crate) const BYREF: u8 = 0x10;
    /// A value type by token.
    pub(crate) const VALUETYPE: u8 = 0x11;
    /// A class by token.
    pub(crate) const CLASS: u8 = 0x12;
    /// A type parameter of the class.
    pub(crate) const VAR: u8 = 0x13;
    /// An array with rank and bounds.
    pub(crate) const ARRAY: u8 = 0x14;
    /// A generic type with its arguments.
    pub(crate) const GENERICINST: u8 = 0x15;
    /// A function pointer.
    pub(crate) const FNPTR: u8 = 0x1b;
    /// `T[]`
    pub(crate) const SZARRAY: u8 = 0x1d;
    /// A type parameter of the method.
    pub(crate) const MVAR: u8 = 0x1e;
    /// Required modifier.
    pub(crate) const CMOD_REQD: u8 = 0x1f;
    /// Optional modifier.
    pub(crate) const CMOD_OPT: u8 = 0x20;
    /// A pointer of the runtime's own (only in dynamic methods).
    pub(crate) const INTERNAL: u8 = 0x21;
    /// Before the variable arguments.
    pub(crate) const SENTINEL: u8 = 0x41;
    /// A pinned local.
    pub(crate) const PINNED: u8 = 0x45;
}

/// The C# word for a simple element type.
pub(super) const fn simple(element: u8) -> Option<&'static str> {
    Some(match element {
        0x01 => "void",
        0x02 => "bool",
        0x03 => "char",
        0x04 => "sbyte",
        0x05 => "byte",
        0x06 => "short",
        0x07 => "ushort",
        0x08 => "int",
        0x09 => "uint",
        0x0a => "long",
        0x0b => "ulong",
        0x0c => "float",
        0x0d => "double",
        0x0e => "string",
        0x16 => "TypedReference",
        0x18 => "nint",
        0x19 => "nuint",
        0x1c => "object",
        _ => return None,
    })
}

/// The C# word for a type's full name.
pub(super) fn word(full_name: &str) -> Option<&'static str> {
    Some(match full_name {
        "System.Void" => "void",
        "System.Boolean" => "bool",
        "System.Char" => "char",
        "System.SByte" => "sbyte",
        "System.Byte" => "byte",
        "System.Int16" => "short",
        "System.UInt16" => "ushort",
        "System.Int32" => "int",
        "System.UInt32" => "uint",
        "System.Int64" => "long",
        "System.UInt64" => "ulong",
        "System.Single" => "float",
        "System.Double" => "double",
        "System.Decimal" => "decimal",
        "System.String" => "string",
        "System.Object" => "object",
        "System.IntPtr" => "nint",
        "System.UIntPtr" => "nuint",
        "System.__Canon" => "__Canon",
        _ => return None,
    })
}

/// Reads a signature from the front.
#[derive(Clone, Copy)]
pub(super) struct SignatureReader<'a>(PayloadFields<'a>);

impl<'a> SignatureReader<'a> {
    /// Of these bytes.
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(PayloadFields(bytes))
    }

    /// The next byte.
    pub(super) fn byte(&mut self) -> Option<u8> {
        self.0.u8()
    }

    /// A compressed number (II.23.2).
    pub(super) fn number(&mut self) -> Option<u32> {
        compressed(&mut self.0)
    }

    /// A TypeDefOrRefOrSpec token (II.23.2.8).
    pub(super) fn token(&mut self) -> Option<u32> {
        let coded = self.number()?;
        let table = match coded & 3 {
            0 => 0x0200_0000,
            1 => 0x0100_0000,
            2 => 0x1b00_0000,
            _ => return None,
        };
        Some(table | coded >> 2)
    }

    /// A pointer.
    pub(super) fn pointer(&mut self) -> Option<u64> {
        self.0.u64()
    }
}

/// Splits `` Name`2 `` into the name and its number of type parameters.
pub(super) fn arity(name: &str) -> (&str, usize) {
    let Some((front, digits)) = name.rsplit_once('`') else { return (name, 0) };
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return (name, 0);
    }
    (front, digits.parse().map_or(64, |count: usize| count.min(64)))
}

/// A name without its namespace. Compiler-made names may hold dots inside `<…>`; those do not
/// count.
pub(super) fn without_namespace(name: &str) -> &str {
    let before = name.split('<').next().unwrap_or(name);
    before.rfind('.').and_then(|dot| name.get(dot + 1..)).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::{arity, without_namespace, word};

    #[test]
    fn names_are_taken_apart() {
        assert_eq!(arity("Dictionary`2"), ("Dictionary", 2));
        assert_eq!(arity("Plain"), ("Plain", 0));
        assert_eq!(arity("Odd`x"), ("Odd`x", 0));
        assert_eq!(arity("Odd`"), ("Odd`", 0));
        assert_eq!(arity("Odd`99999999999999999999"), ("Odd", 64));
        assert_eq!(without_namespace("A.B.C"), "C");
        assert_eq!(without_namespace("<A.B>d__1"), "<A.B>d__1");
        assert_eq!(word("System.Int32"), Some("int"));
        assert_eq!(word("System.Int3"), None);
    }
}
