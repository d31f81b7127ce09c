//! DWARF expressions, as far as their value can be known before a frame is seen.

use crate::machine::TargetMachine;
use crate::rule::{Register, RuleRefusal};
use gimli::{EndianSlice, LittleEndian, Operation};

pub(super) type SectionBytes<'a> = EndianSlice<'a, LittleEndian>;
/// Most operations of one DWARF expression, and values on its stack.
const MAX_OPERATIONS: usize = 64;

pub(super) fn general(
    machine: &TargetMachine,
    register: gimli::Register,
) -> Result<Register, RuleRefusal> {
    machine.registers.by_dwarf(register.0).ok_or(RuleRefusal::Unsupported)
}

pub(super) fn narrow(offset: i64) -> Result<i32, RuleRefusal> {
    i32::try_from(offset).map_err(|_| RuleRefusal::Unsupported)
}

/// Value of an expression as far as it can be known before a frame is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpressionValue {
    Constant(u64),
    Register { base: Register, offset: i64 },
    Deref { base: Register, offset: i64, add: i64 },
}

impl ExpressionValue {
    fn plus(self, n: i64) -> Self {
        match self {
            Self::Constant(c) => Self::Constant(c.wrapping_add_signed(n)),
            Self::Register { base, offset } => {
                Self::Register { base, offset: offset.wrapping_add(n) }
            }
            Self::Deref { base, offset, add } => {
                Self::Deref { base, offset, add: add.wrapping_add(n) }
            }
        }
    }

    fn constant(self) -> Result<u64, RuleRefusal> {
        match self {
            Self::Constant(c) => Ok(c),
            _ => Err(RuleRefusal::Unsupported),
        }
    }
}

/// Evaluates an expression at `address`, the only register whose value is known.
pub(super) fn evaluate(
    machine: &TargetMachine,
    expression: gimli::Expression<SectionBytes<'_>>,
    encoding: gimli::Encoding,
    address: u64,
) -> Result<ExpressionValue, RuleRefusal> {
    let mut operations = expression.operations(encoding);
    let mut stack: Vec<ExpressionValue> = Vec::new();
    for _ in 0..MAX_OPERATIONS {
        let Some(operation) = operations.next().map_err(|_| RuleRefusal::Malformed)? else {
            return stack.pop().ok_or(RuleRefusal::Malformed);
        };
        let mut pop = || stack.pop().ok_or(RuleRefusal::Malformed);
        let value = match operation {
            Operation::Nop => continue,
            Operation::UnsignedConstant { value } => ExpressionValue::Constant(value),
            Operation::SignedConstant { value } => ExpressionValue::Constant(value.cast_unsigned()),
            Operation::RegisterOffset { register, offset, .. }
                if Some(register.0) == machine.dwarf.instruction_pointer =>
            {
                ExpressionValue::Constant(address.wrapping_add_signed(offset))
            }
            Operation::RegisterOffset { register, offset, .. } => {
                ExpressionValue::Register { base: general(machine, register)?, offset }
            }
            Operation::PlusConstant { value } => pop()?.plus(value.cast_signed()),
            Operation::Plus => match (pop()?, pop()?) {
                (ExpressionValue::Constant(c), other) | (other, ExpressionValue::Constant(c)) => {
                    other.plus(c.cast_signed())
                }
                _ => return Err(RuleRefusal::Unsupported),
            },
            Operation::Minus => {
                let right = pop()?.constant()?;
                pop()?.plus(right.wrapping_neg().cast_signed())
            }
            Operation::And => ExpressionValue::Constant(pop()?.constant()? & pop()?.constant()?),
            Operation::Shl => {
                let count = pop()?.constant()?;
                let value = pop()?.constant()?;
                ExpressionValue::Constant(
                    u32::try_from(count).ok().and_then(|c| value.checked_shl(c)).unwrap_or(0),
                )
            }
            Operation::Ge => {
                let right = pop()?.constant()?.cast_signed();
                ExpressionValue::Constant(u64::from(pop()?.constant()?.cast_signed() >= right))
            }
            Operation::Deref { size: 8, space: false, .. } => match pop()? {
                ExpressionValue::Register { base, offset } => {
                    ExpressionValue::Deref { base, offset, add: 0 }
                }
                _ => return Err(RuleRefusal::Unsupported),
            },
            _ => return Err(RuleRefusal::Unsupported),
        };
        stack.push(value);
    }
    Err(RuleRefusal::Unsupported)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x86_64::X86_64;
    use proptest::prelude::{any, proptest};

    fn at(bytes: &[u8], address: u64) -> Result<ExpressionValue, RuleRefusal> {
        let encoding =
            gimli::Encoding { address_size: 8, format: gimli::Format::Dwarf32, version: 4 };
        evaluate(
            &X86_64,
            gimli::Expression(EndianSlice::new(bytes, LittleEndian)),
            encoding,
            address,
        )
    }

    #[test]
    fn a_plt_entry_has_one_word_more_once_it_pushed_its_index() {
        // breg7 8; breg16 0; lit15; and; lit11; ge; lit3; shl; plus
        let plt = [0x77, 8, 0x80, 0, 0x3f, 0x1a, 0x3b, 0x2a, 0x33, 0x24, 0x22];
        assert_eq!(
            at(&plt, 0x1020),
            Ok(ExpressionValue::Register { base: Register::RSP, offset: 8 })
        );
        assert_eq!(
            at(&plt, 0x102b),
            Ok(ExpressionValue::Register { base: Register::RSP, offset: 16 })
        );
    }

    #[test]
    fn a_cfa_kept_in_the_frame_is_one_dereference() {
        // breg7 40; deref; plus_uconst 8
        let saved = [0x77, 40, 0x06, 0x23, 8];
        assert_eq!(
            at(&saved, 0),
            Ok(ExpressionValue::Deref { base: Register::RSP, offset: 40, add: 8 })
        );
    }

    proptest! {
        #[test]
        fn random_expressions_end(bytes in any::<Vec<u8>>(), address in any::<u64>()) {
            at(&bytes, address).ok();
        }
    }
}
