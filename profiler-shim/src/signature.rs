//! Method signatures (ECMA-335 II.23.2): a reader with bounds, and C# words for the simple types.

/// Element types (ECMA-335 II.23.1.16).
pub(crate) mod element {
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
#[must_use]
pub(crate) const fn simple(element: u8) -> Option<&'static str> {
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

/// C# words by full name, for types met as ClassIDs or tokens.
const WORDS: &[(&str, &str)] = &[
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

/// The C# word for a type's full name.
#[must_use]
pub(crate) fn word(full_name: &[u16]) -> Option<&'static str> {
    WORDS
        .iter()
        .find(|(name, _)| name.encode_utf16().eq(full_name.iter().copied()))
        .map(|(_, word)| *word)
}

/// Reads a signature from the front.
#[derive(Clone, Copy)]
pub(crate) struct SignatureReader<'a>(pub &'a [u8]);

impl SignatureReader<'_> {
    /// The next byte.
    pub(crate) fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// A compressed number (II.23.2): 1, 2 or 4 bytes, big-endian.
    pub(crate) fn number(&mut self) -> Option<u32> {
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
    pub(crate) fn token(&mut self) -> Option<u32> {
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
    pub(crate) fn pointer(&mut self) -> Option<u64> {
        let (bytes, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*bytes))
    }
}

/// Splits `` Name`2 `` into the name and its number of type parameters.
#[must_use]
pub(crate) fn arity(name: &[u16]) -> (&[u16], usize) {
    let Some(tick) = name.iter().rposition(|u| *u == u16::from(b'`')) else { return (name, 0) };
    let (front, digits) = name.split_at_checked(tick).unwrap_or((name, &[]));
    let mut number = 0usize;
    for digit in digits.iter().skip(1) {
        match u8::try_from(*digit) {
            Ok(digit @ b'0'..=b'9') => {
                number =
                    number.saturating_mul(10).saturating_add(usize::from(digit.wrapping_sub(b'0')));
            }
            _ => return (name, 0),
        }
    }
    if digits.len() < 2 { (name, 0) } else { (front, number.min(64)) }
}

/// A name without its namespace. Compiler-made names may hold dots inside `<…>`; those do not
/// count.
#[must_use]
pub(crate) fn without_namespace(name: &[u16]) -> &[u16] {
    let angle = name.iter().position(|u| *u == u16::from(b'<')).unwrap_or(name.len());
    let dot = name.iter().take(angle).rposition(|u| *u == u16::from(b'.'));
    dot.and_then(|d| name.get(d.wrapping_add(1)..)).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::{SignatureReader, arity, without_namespace, word};

    fn wide(text: &str) -> Vec<u16> {
        text.encode_utf16().collect()
    }

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

    #[test]
    fn names_are_taken_apart() {
        assert_eq!(arity(&wide("Dictionary`2")), (&wide("Dictionary")[..], 2));
        assert_eq!(arity(&wide("Plain")), (&wide("Plain")[..], 0));
        assert_eq!(arity(&wide("Odd`x")), (&wide("Odd`x")[..], 0));
        assert_eq!(arity(&wide("Odd`")), (&wide("Odd`")[..], 0));
        assert_eq!(without_namespace(&wide("A.B.C")), wide("C"));
        assert_eq!(without_namespace(&wide("<A.B>d__1")), wide("<A.B>d__1"));
        assert_eq!(word(&wide("System.Int32")), Some("int"));
        assert_eq!(word(&wide("System.Int3")), None);
    }
}
