//! NativeFormat's numbers, strings and handles, with bounds (dotnet/runtime
//! src/coreclr/tools/Common/Internal/NativeFormat/NativeFormatReader.Primitives.cs).

/// Longest string that is taken: identifiers.
const MAX_STRING_BYTES: usize = 1024;

/// A reference to a record of the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Handle {
    /// `HandleType`.
    pub(super) kind: u8,
    /// Offset of the record; 0 for none.
    pub(super) at: u32,
}

impl Handle {
    /// From the form that is compressed in records.
    fn of_record(value: u32) -> Self {
        Self { kind: (value & 0x7f) as u8, at: value >> 7 }
    }

    /// From the form that stands outside of the metadata.
    pub(super) fn of_token(value: u32) -> Self {
        Self { kind: (value >> 25) as u8, at: value & 0x01ff_ffff }
    }
}

/// Reads a blob from a place on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at }
    }

    pub(super) fn position(&self) -> usize {
        self.at
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.at >= self.bytes.len()
    }

    pub(super) fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = *self.bytes.get(self.at..)?.first_chunk::<N>()?;
        self.at += N;
        Some(bytes)
    }

    pub(super) fn byte(&mut self) -> Option<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    /// The low bits of the first byte say how many bytes a number has, one to five.
    pub(super) fn unsigned(&mut self) -> Option<u32> {
        let first = u32::from(*self.bytes.get(self.at)?);
        let length = usize::try_from(first.trailing_ones()).ok()? + 1;
        match length {
            1..=4 => {
                let mut word = [0; 4];
                let bytes = self.bytes.get(self.at..self.at + length)?;
                word.get_mut(..length)?.copy_from_slice(bytes);
                self.at += length;
                Some(u32::from_le_bytes(word) >> length)
            }
            5 => {
                self.at += 1;
                self.take::<4>().map(u32::from_le_bytes)
            }
            _ => None,
        }
    }

    /// The same for a number that may be below zero: of these only the ones that are not.
    pub(super) fn index(&mut self) -> Option<u32> {
        let length = self.bytes.get(self.at)?.trailing_ones() + 1;
        let value = self.unsigned()?;
        let bits = if length < 5 { length * 7 } else { 32 };
        (value >> (bits - 1) == 0).then_some(value)
    }

    pub(super) fn handle(&mut self) -> Option<Handle> {
        self.unsigned().map(Handle::of_record)
    }

    /// A string, which begins with its length.
    pub(super) fn text(&mut self) -> Option<&'a str> {
        let length = usize::try_from(self.unsigned()?).ok().filter(|l| *l <= MAX_STRING_BYTES)?;
        let bytes = self.bytes.get(self.at..self.at + length)?;
        self.at += length;
        std::str::from_utf8(bytes).ok()
    }

    /// A list of so many elements at most.
    pub(super) fn list<T>(
        &mut self,
        most: u32,
        mut read: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<Vec<T>> {
        let count = self.unsigned().filter(|count| *count <= most)?;
        (0..count).map(|_| read(self)).collect()
    }

    /// Passes over a list of numbers.
    pub(super) fn skip_list(&mut self, most: u32) -> Option<()> {
        let count = self.unsigned().filter(|count| *count <= most)?;
        (0..count).try_for_each(|_| self.unsigned().map(drop))
    }
}

#[cfg(test)]
mod tests {
    use super::{Handle, Reader};

    #[test]
    fn numbers_have_one_to_five_bytes() {
        let read = |bytes: &[u8]| {
            let mut reader = Reader::new(bytes, 0);
            (reader.unsigned(), reader.position())
        };
        assert_eq!(read(&[0x0e]), (Some(7), 1));
        assert_eq!(read(&[0x01 | 0x3 << 2, 1]), (Some(0x43), 2));
        assert_eq!(read(&[0x03 | 0x1 << 3, 1, 1]), (Some(1 | 1 << 5 | 1 << 13), 3));
        assert_eq!(read(&[0x07, 0, 0, 1]), (Some(1 << 20), 4));
        assert_eq!(read(&[0x0f, 0xff, 0xff, 0xff, 0xff]), (Some(u32::MAX), 5));
        for bytes in [&[][..], &[0x01], &[0x07, 0, 0], &[0x0f, 0], &[0x1f, 0, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(read(bytes).0, None, "{bytes:?}");
        }
        assert_eq!(Reader::new(&[0xfe], 0).index(), None, "-1");
        assert_eq!(Reader::new(&[0x7e], 0).index(), Some(63));
        assert_eq!(Handle::of_token(0x3a << 25 | 5), Handle { kind: 0x3a, at: 5 });
    }
}
