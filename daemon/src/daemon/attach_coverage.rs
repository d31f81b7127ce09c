//! How many of a service's .NET processes have the shim. A profile must not show zero where no shim
//! counted.

use perfusion_sources::shim::{COLUMNS, NOT_ALL_RECORDED, NOT_RECORDED};
use std::time::{Duration, Instant};

/// The .NET processes of a service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttachCoverage {
    /// How many there are.
    pub processes: u32,
    /// Those that have the shim.
    pub attached: u32,
    /// Why one that does not has none.
    pub why: Option<String>,
    /// When one was attached to, or left.
    pub changed: Option<Instant>,
}

impl AttachCoverage {
    /// One more process.
    pub fn add(&mut self, is_attached: bool, why: Option<&String>, changed: Option<Instant>) {
        self.processes += 1;
        self.attached += u32::from(is_attached);
        if !is_attached && self.why.is_none() {
            self.why = why.cloned();
        }
        self.changed = self.changed.max(changed);
    }

    /// What a profile of the last `duration` has to say of it.
    pub fn comments(
        &self,
        now: Instant,
        duration: Duration,
    ) -> impl Iterator<Item = String> + use<> {
        let Self { processes, attached, .. } = *self;
        let why = self.why.as_deref().unwrap_or("not yet attached to");
        let partly =
            self.changed.is_some_and(|changed| now.saturating_duration_since(changed) < duration);
        let lacking = match attached {
            _ if attached == processes => None,
            0 => Some(format!(
                "{COLUMNS}{NOT_RECORDED}: none of {processes} .NET processes has the library: \
                 {why}"
            )),
            _ => {
                let without = processes - attached;
                Some(format!(
                    "{COLUMNS}{NOT_ALL_RECORDED}{without} of {processes} .NET processes, which \
                     have no library: {why}"
                ))
            }
        };
        let partly = partly.then(|| {
            format!(
                "{COLUMNS}{NOT_ALL_RECORDED}all this time: .NET processes were attached to or \
                 left meanwhile; rates are of the whole time"
            )
        });
        lacking.into_iter().chain(partly)
    }
}

#[cfg(test)]
mod tests {
    use super::AttachCoverage;
    use std::time::{Duration, Instant};

    #[test]
    fn what_nobody_counted_is_said() {
        let (now, minute) = (Instant::now(), Duration::from_secs(60));
        let off = "attach.policy is off".to_owned();
        let mut covered = AttachCoverage::default();
        let said = |covered: &AttachCoverage| covered.comments(now, minute).collect::<Vec<_>>();
        assert!(said(&covered).is_empty(), "no .NET");
        covered.add(false, Some(&off), None);
        assert!(said(&covered)[0].ends_with(
            ": not recorded: none of 1 .NET processes has the library: attach.policy is off"
        ));
        covered.add(true, None, Some(now - 2 * minute));
        assert!(
            said(&covered)[0].contains(": not of 1 of 2 .NET processes"),
            "{:?}",
            said(&covered)
        );
        let mut whole = AttachCoverage::default();
        whole.add(true, None, Some(now - 2 * minute));
        assert!(said(&whole).is_empty());
        whole.add(true, None, Some(now - minute / 2));
        assert!(said(&whole)[0].contains(": not of all this time"));
    }
}
