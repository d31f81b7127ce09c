//! Moments of each process, out of snapshots of any number of processes in any order: a daemon
//! writes one file for each service and window. Live objects can be compared as long as somebody
//! has watched without a break, so of each process the last unbroken stretch is taken.

use super::snapshot::{NamedPid, Snapshot};
use std::collections::HashMap;

/// What two profiles say of the moment when watching began differs by less, and the library is
/// silent for longer before it begins anew.
const CLOCKS_S: f64 = 0.5;
/// A window begins where the one before ended, but for the time it takes to cut it.
const BREAK_S: f64 = 2.0;

/// The moments at which a process was looked at without a break.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stretch {
    /// Places of its snapshots, in order of time.
    pub moments: Vec<usize>,
    /// Earlier ones, before the last break.
    pub left_out: usize,
    /// How long nobody watched in that break, seconds.
    pub break_s: f64,
    /// When the watching began, as the last moment with something alive said.
    since_s: Option<f64>,
}

/// Sorts snapshots into the stretches of their processes.
#[must_use]
pub fn stretches(snapshots: &[Snapshot]) -> HashMap<NamedPid, Stretch> {
    let mut order: Vec<usize> = (0..snapshots.len()).collect();
    let at = |place: usize| snapshots.get(place).map_or(0.0, |snapshot| snapshot.at_s);
    order.sort_by(|a, b| at(*a).total_cmp(&at(*b)));
    let mut stretches: HashMap<NamedPid, Stretch> = HashMap::new();
    for place in order {
        let Some(snapshot) = snapshots.get(place) else { continue };
        for process in &snapshot.processes {
            let stretch = stretches.entry(process.clone()).or_default();
            let since_s = snapshot.watched_since_s.get(process).copied();
            if let Some(last) = stretch.moments.last().map(|last| at(*last)) {
                if last == snapshot.at_s {
                    // The same file twice, or a copy of it.
                    continue;
                }
                // Nobody wrote windows; or the library let go of its objects meanwhile, as it does
                // when its recorder is silent for long.
                let unseen_s = snapshot.at_s - snapshot.length_s - last;
                let anew = since_s.zip(stretch.since_s).filter(|(now, then)| now - then > CLOCKS_S);
                if unseen_s > BREAK_S || anew.is_some() {
                    let break_s =
                        anew.map_or(unseen_s, |(now, _)| unseen_s.max(now - last).max(0.0));
                    stretch.left_out += stretch.moments.len();
                    stretch.break_s = break_s;
                    stretch.moments.clear();
                }
            }
            stretch.since_s = since_s.or(stretch.since_s);
            stretch.moments.push(place);
        }
    }
    stretches
}

#[cfg(test)]
mod tests {
    use super::stretches;
    use crate::leaks::snapshot::Snapshot;

    fn window(at_s: f64, pid: i64) -> Snapshot {
        let processes = [(pid, "shop".to_owned())].into();
        Snapshot { at_s, length_s: 10.0, processes, ..Snapshot::default() }
    }

    #[test]
    fn windows_of_several_services_are_told_apart_and_put_in_order() {
        let all =
            [window(30.0, 1), window(20.0, 2), window(20.5, 1), window(20.5, 1), window(30.0, 2)];
        let found = stretches(&all);
        let of = |pid| &found[&(pid, "shop".to_owned())];
        assert_eq!((of(1).moments.as_slice(), of(1).left_out), (&[2, 0][..], 0));
        assert_eq!((of(2).moments.as_slice(), of(2).left_out), (&[1, 4][..], 0));
    }

    #[test]
    fn what_was_before_a_break_is_not_compared() {
        let found =
            stretches(&[window(20.0, 1), window(30.0, 1), window(75.0, 1), window(85.5, 1)]);
        let of = &found[&(1, "shop".to_owned())];
        assert_eq!((of.moments.as_slice(), of.left_out, of.break_s), (&[2, 3][..], 2, 35.0));
    }

    #[test]
    fn looks_at_a_running_process_go_on_from_one_beginning() {
        let look = |at_s: f64| Snapshot { length_s: at_s, ..window(at_s, 1) };
        let found = stretches(&[look(5.0), look(10.0), look(15.0)]);
        assert_eq!(found[&(1, "shop".to_owned())].moments, [0, 1, 2]);
    }

    #[test]
    fn objects_that_were_let_go_of_in_between_are_not_compared_with_later_ones() {
        let look = |at_s: f64, since_s: f64| {
            let watched_since_s = [((1, "shop".to_owned()), since_s)].into();
            Snapshot { length_s: at_s, watched_since_s, ..window(at_s, 1) }
        };
        let found =
            stretches(&[look(5.0, 0.2), look(10.0, 0.2), look(15.0, 12.5), look(20.0, 12.4)]);
        let of = &found[&(1, "shop".to_owned())];
        assert_eq!((of.moments.as_slice(), of.left_out, of.break_s), (&[2, 3][..], 2, 2.5));
        // Begun anew just when it was looked at.
        let found = stretches(&[look(5.0, 0.2), look(10.0, 0.2), look(15.0, 10.01)]);
        assert_eq!(found[&(1, "shop".to_owned())].moments, [2]);
    }
}
