//! How long the managed threads stood still for the collections that a survey asked for.

use perfusion_dotnet::fields::PayloadFields;
use std::time::Duration;

/// The reason of a collection that a session or the application itself asked for.
const INDUCED: u32 = 1;
const OLDEST_GENERATION: u32 = 2;
/// Stops and starts of the managed threads, and collections, that are kept: all that happens while
/// a survey is taken.
const MAX_MARKS: usize = 1 << 16;

/// What the pause is worked out from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PauseMark {
    /// The runtime begins to stop the managed threads.
    Suspending,
    /// A full collection begins that was asked for.
    Induced,
    /// The managed threads run again.
    Restarted,
}

/// The marks of a stream with their times. Threads write them, so they need not come in order.
#[derive(Debug, Default)]
pub(super) struct PauseMarks(Vec<(u64, PauseMark)>);

impl PauseMarks {
    /// True when a full collection that was asked for has begun.
    pub(super) fn has_induced(&self) -> bool {
        self.0.iter().any(|(_, mark)| *mark == PauseMark::Induced)
    }

    pub(super) fn mark(&mut self, time_ns: u64, mark: PauseMark) {
        if self.0.len() < MAX_MARKS {
            self.0.push((time_ns, mark));
        }
    }

    /// Takes the event of a collection's begin; `None` when it has not the layout it should.
    pub(super) fn collection(&mut self, mut fields: PayloadFields<'_>, time_ns: u64) -> Option<()> {
        let [_number, generation, reason] = [fields.u32()?, fields.u32()?, fields.u32()?];
        if generation == OLDEST_GENERATION && reason == INDUCED {
            self.mark(time_ns, PauseMark::Induced);
        }
        Some(())
    }

    /// How long the managed threads stood still for collections that were asked for, and how many
    /// those were.
    pub(super) fn pause(mut self) -> (Duration, u32) {
        self.0.sort_unstable();
        let (mut pause_ns, mut collections, mut stopped, mut induced) = (0u64, 0u32, None, 0u32);
        for (time_ns, mark) in self.0 {
            match mark {
                PauseMark::Suspending => (stopped, induced) = (Some(time_ns), 0),
                PauseMark::Induced => induced += 1,
                PauseMark::Restarted => {
                    if let Some(begin) = stopped.take().filter(|_| induced > 0) {
                        pause_ns = pause_ns.saturating_add(time_ns - begin);
                        collections += induced;
                    }
                }
            }
        }
        (Duration::from_nanos(pause_ns), collections)
    }
}
