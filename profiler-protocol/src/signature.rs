//! Signatures in metadata (ECMA-335 II.23.2): a reader with bounds, the element types, and C# words
//! for the simple types. The shim and whoever reads names from memory share it, so both give a
//! method the same name.

/// Element types (ECMA-335 II.23.1.16).
pub mod element {
    /// `T*`
    pub const PTR: u8 = 0x0f;
    /// `ref T`
    pub const BYREF: u8 = 0x10;
    /// A value type by token.
    pub const VALUETYPE: u8 = 0x11;
    /// A class by token.
    pub const CLASS: u8 = 0x12;
    /// A type parameter of the class.
    pub const VAR: u8 = 0x13;
    /// An array with rank and bounds.
    pub const ARRAY: u8 = 0x14;
    /// A generic type with its arguments.
    pub const GENERICINST: u8 = 0x15;
    /// A function pointer.
    pub const FNPTR: u8 = 0x1b;
    /// `T[]`
    pub const SZARRAY: u8 = 0x1d;
    /// A type parameter of the method.
    pub const MVAR: u8 = 0x1e;
    /// Required modifier.
    pub const CMOD_REQD: u8 = 0x1f;
    /// Optional modifier.
    pub const CMOD_OPT: u8 = 0x20;
    /// A pointer of the runtime's own (only in dynamic methods).
    pub const INTERNAL: u8 = 0x21;
    /// Before the variable arguments.
    pub const SENTINEL: u8 = 0x41;
    /// A pinned local.
    pub const PINNED: u8 = 0x45;
}

/// The C# word for a simple element type.
#[must_use]
pub const fn simple(element: u8) -> Option<&'static str> {
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

/// C# words by a type's full name.
pub const WORDS: &[(&str, &str)] = &[
    ("System.Void", "void"),
    ("System.Boolean", "bool"),
    ("System.Char", "char"),
    ("System.SByte", "sbyte"),
    ("System.Byte", "byte"),
    ("System.Int16", "short"),
    ("System.UInt16", "ushort"),
    ("System.Int32", "int"),
    ("System.UInt32", "uint"),
    ("System.Int64", "long"),
    ("System.UInt64", "ulong"),
    ("System.Single", "float"),
    ("System.Double", "double"),
    ("System.Decimal", "decimal"),
    ("System.String", "string"),
    ("System.Object", "object"),
    ("System.IntPtr", "nint"),
    ("System.UIntPtr", "nuint"),
    ("System.__Canon", "__Canon"),
];

/// Reads a signature from the front. What does not fit is `None`, and where it then stands is not
/// said.
#[derive(Clone, Copy, Debug)]
pub struct SignatureReader<'a>(pub &'a [u8]);

impl SignatureReader<'_> {
    /// The next byte.
    pub fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// A compressed number (II.23.2): 1, 2 or 4 bytes, big-endian.
    pub fn number(&mut self) -> Option<u32> {
        let first = self.byte()?;
        let more = if first & 0x80 == 0 {
            return Some(u32::from(first));
        } else if first & 0xc0 == 0x80 {
            [0, 0, first & 0x3f, self.byte()?]
        } else if first & 0xe0 == 0xc0 {
            [first & 0x1f, self.byte()?, self.byte()?, self.byte()?]
        } else {
            return None;
        };
        Some(u32::from_be_bytes(more))
    }

    /// A TypeDefOrRefOrSpec token (II.23.2.8).
    pub fn token(&mut self) -> Option<u32> {
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
    pub fn pointer(&mut self) -> Option<u64> {
        let (bytes, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::SignatureReader;

    #[test]
    fn compressed_numbers_are_those_of_the_standard() {
        for (bytes, number) in [
            (&[0x03][..], Some(0x03)),
            (&[0x7f], Some(0x7f)),
            (&[0x80, 0x80], Some(0x80)),
            (&[0xae, 0x57], Some(0x2e57)),
            (&[0xbf, 0xff], Some(0x3fff)),
            (&[0xc0, 0x00, 0x40, 0x00], Some(0x4000)),
            (&[0xdf, 0xff, 0xff, 0xff], Some(0x1fff_ffff)),
            (&[0xff], None),
            (&[0x80], None),
            (&[], None),
        ] {
            assert_eq!(SignatureReader(bytes).number(), number, "{bytes:x?}");
        }
        assert_eq!(SignatureReader(&[0x49]).token(), Some(0x0100_0012));
    }
}
