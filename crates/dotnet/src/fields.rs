//! Little-endian fields taken off the front of bytes that the profiled process wrote. Whatever they
//! are, each take is a value or `None`.

/// What is left of them.
#[derive(Clone, Copy, Debug)]
pub struct PayloadFields<'a>(pub &'a [u8]);

impl<'a> PayloadFields<'a> {
    /// The next bytes.
    pub fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    /// One byte.
    pub fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    /// Two bytes.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    /// Four bytes.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A number in pieces of seven bits, lowest first; the eighth bit says that another piece
    /// follows.
    pub fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    /// The same, of at most 32 bits.
    pub(crate) fn varint32(&mut self) -> Option<u32> {
        u32::try_from(self.varint()?).ok()
    }

    /// UTF-16 up to a zero, as text.
    pub fn text(&mut self) -> Option<String> {
        let units = self.0.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        let length = units.clone().position(|unit| unit == 0)?;
        let text = char::decode_utf16(units.take(length))
            .map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER));
        let text = text.collect();
        self.take(length * 2 + 2)?;
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::PayloadFields;
    use proptest::{collection::vec, prelude::any, prop_assert, proptest};

    #[test]
    fn fields_are_taken_in_order_and_never_past_the_end() {
        let mut fields = PayloadFields(&[1, 2, 0, 0xac, 0x02, b'h', 0, b'i', 0, 0, 0, 9]);
        assert_eq!((fields.u8(), fields.u16(), fields.varint()), (Some(1), Some(2), Some(300)));
        assert_eq!(
            (fields.text().as_deref(), fields.u16(), fields.u8()),
            (Some("hi"), None, Some(9))
        );
        assert_eq!((fields.u8(), fields.text()), (None, None));
        assert_eq!(PayloadFields(&[0xff; 11]).varint(), None);
        assert_eq!(PayloadFields(&[0xff, 0xff, 0xff, 0xff, 0x1f]).varint32(), None);
    }

    proptest! {
        #[test]
        fn every_take_makes_the_rest_shorter(bytes in vec(any::<u8>(), 0..64)) {
            let mut fields = PayloadFields(&bytes);
            let mut left = bytes.len();
            while fields.text().is_some() || fields.varint().is_some() {
                prop_assert!(fields.0.len() < left);
                left = fields.0.len();
            }
        }
    }
}
