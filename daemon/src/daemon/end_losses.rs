//! Profiles that are lost because the daemon ends, by cause and service.

use std::collections::BTreeMap;
use std::sync::Arc;

/// So many services are named for one cause. Of more the number is said.
const NAMED: usize = 100;

/// Number of lost profiles by cause and service.
#[derive(Debug, Default)]
pub(super) struct EndLosses(BTreeMap<String, BTreeMap<Arc<str>, u64>>);

impl EndLosses {
    /// One profile of this service is lost.
    pub(super) fn add(&mut self, cause: &str, service: &Arc<str>) {
        let services = self.0.entry(cause.to_owned()).or_default();
        *services.entry(Arc::clone(service)).or_default() += 1;
    }

    /// Says the sum of each cause.
    pub(super) fn say(&self, sink: &str) {
        for (cause, profiles, services) in self.sums() {
            tracing::error!(sink, profiles, services, "lost at the end: {cause}");
        }
    }

    /// Each cause with its number of profiles, and of each service in words.
    pub(super) fn sums(&self) -> Vec<(&str, u64, String)> {
        let sums = self.0.iter().map(|(cause, services)| {
            let (profiles, services) = sum(services);
            (cause.as_str(), profiles, services)
        });
        sums.collect()
    }
}

/// The number of all profiles, and that of each service in words.
fn sum(services: &BTreeMap<Arc<str>, u64>) -> (u64, String) {
    let named = services.iter().take(NAMED).map(|(service, count)| format!("{count} of {service}"));
    let mut text = named.collect::<Vec<_>>().join(", ");
    let others: Vec<u64> = services.values().skip(NAMED).copied().collect();
    if !others.is_empty() {
        let (profiles, count) = (others.iter().sum::<u64>(), others.len());
        text.push_str(&format!(", {profiles} of {count} more services"));
    }
    (services.values().sum(), text)
}

#[cfg(test)]
mod tests {
    use super::{EndLosses, NAMED};

    #[test]
    fn losses_are_summed_up_by_cause_and_service() {
        let mut losses = EndLosses::default();
        for service in ["web", "shop", "web"] {
            losses.add("late", &service.into());
        }
        losses.add("refused", &"web".into());
        let expected =
            [("late", 3, "1 of shop, 2 of web".to_owned()), ("refused", 1, "1 of web".to_owned())];
        assert_eq!(losses.sums(), expected);
    }

    #[test]
    fn of_many_services_the_number_is_said() {
        let mut losses = EndLosses::default();
        for number in 0..NAMED + 20 {
            losses.add("late", &format!("service {number}").as_str().into());
        }
        let [(_, 120, text)] = &losses.sums()[..] else { panic!("{losses:?}") };
        assert!(text.ends_with(", 20 of 20 more services"), "{text}");
    }
}
