//! Texts that entries refer to.

use super::sections::{DebugSections, DwarfError, Slice, WorkBudget};
use super::units::Unit;
use gimli::{AttributeValue, Format};

/// The text of an attribute of `unit`; `None` for one in a file that is not read.
pub(super) fn text(
    value: &AttributeValue<Slice<'_>>,
    unit: &Unit,
    sections: &DebugSections<'_>,
    budget: &mut WorkBudget,
) -> Result<Option<String>, DwarfError> {
    let file = sections.file;
    match value {
        AttributeValue::String(text) => {
            budget.spend(text.len() as u64)?;
            Ok(Some(String::from_utf8_lossy(text.slice()).into_owned()))
        }
        AttributeValue::DebugStrRef(at) => sections.str.text(file, at.0 as u64, budget).map(Some),
        AttributeValue::DebugLineStrRef(at) => {
            sections.line_str.text(file, at.0 as u64, budget).map(Some)
        }
        AttributeValue::DebugStrOffsetsIndex(index) => {
            let bytes: u64 = if unit.encoding.format == Format::Dwarf64 { 8 } else { 4 };
            let at = (index.0 as u64).saturating_mul(bytes).saturating_add(unit.str_offsets_base);
            let piece = sections.str_offsets.piece(file, at, bytes, budget)?;
            let mut word = [0; 8];
            word.iter_mut().zip(&piece).for_each(|(to, from)| *to = *from);
            sections.str.text(file, u64::from_le_bytes(word), budget).map(Some)
        }
        _ => Ok(None),
    }
}
