//! The head of a PE image: where its directories and its sections are listed. It is as in the file,
//! wherever the rest is mapped.

use crate::fields::PayloadFields;

/// Of an image whose bytes are handed in each time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeHead {
    directories: u32,
    /// Where they begin, and how many there are.
    sections: (u32, u16),
}

impl PeHead {
    /// Reads the one at the beginning of these bytes. No more than `most` sections are looked at.
    pub(crate) fn read(bytes: &[u8], most: u16) -> Option<Self> {
        let from = |at: u32| from(bytes, at);
        if !bytes.starts_with(b"MZ") {
            return None;
        }
        let signature = from(0x3c)?.u32()?;
        let mut coff = from(signature)?;
        if coff.u32()? != 0x4550 {
            return None;
        }
        let _machine = coff.u16()?;
        let count = coff.u16()?.min(most);
        coff.take(12)?;
        let optional_bytes = u32::from(coff.u16()?);
        let optional = signature.checked_add(24)?;
        // The directories stand after 96 bytes of a 32-bit head, 112 of a 64-bit one.
        let directories = optional.checked_add(match from(optional)?.u16()? {
            0x10b => 96,
            0x20b => 112,
            _ => return None,
        })?;
        Some(Self { directories, sections: (optional.checked_add(optional_bytes)?, count) })
    }

    /// A directory of the image with these bytes: address and size.
    pub(crate) fn directory(&self, bytes: &[u8], number: u32) -> Option<(u32, u32)> {
        let mut fields = from(bytes, self.directories.checked_add(number.checked_mul(8)?)?)?;
        Some((fields.u32()?, fields.u32()?))
    }

    /// Where in the file an address is.
    pub(crate) fn file_offset(&self, bytes: &[u8], address: u32) -> Option<u32> {
        let (at, count) = self.sections;
        let mut table = from(bytes, at)?;
        (0..count).find_map(|_| {
            let mut section = PayloadFields(table.take(40)?);
            section.take(8)?;
            let [size, begin, raw_size, raw] =
                [section.u32()?, section.u32()?, section.u32()?, section.u32()?];
            let inside =
                address.checked_sub(begin).filter(|&inside| inside < size.max(raw_size))?;
            raw.checked_add(inside)
        })
    }
}

/// Fields of these bytes from an offset on.
pub(crate) fn from(bytes: &[u8], at: u32) -> Option<PayloadFields<'_>> {
    bytes.get(usize::try_from(at).ok()?..).map(PayloadFields)
}
