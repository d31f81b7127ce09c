//! Messages while a survey is taken. They say what was asked of the runtime and what was seen of
//! it.

use perfusion_heap::collect::SurveyProgress;
use std::time::{Duration, Instant};

/// A collection that has not begun by then is held up by something.
const LATE: Duration = Duration::from_secs(2);

/// Says each thing once.
pub(super) struct SurveyMessages<S> {
    pid: u32,
    asked: Instant,
    stopped: bool,
    late: bool,
    say: S,
}

impl<S: FnMut(&str)> SurveyMessages<S> {
    /// The survey begins now.
    pub(super) fn begin(pid: u32, name: &str, mut say: S) -> Self {
        say(&format!(
            "pid {pid} ({name}): its runtime is asked for a full collection and a walk over its \
             heap, \
             for which it stops the managed threads"
        ));
        Self { pid, asked: Instant::now(), stopped: false, late: false, say }
    }

    /// It is so far now.
    pub(super) fn see(&mut self, progress: SurveyProgress) {
        let (pid, asked) = (self.pid, self.asked.elapsed());
        if progress.stopped && !self.stopped {
            self.stopped = true;
            (self.say)(&format!(
                "pid {pid}: its managed threads are stopped, the collection has begun"
            ));
        } else if !self.stopped && !self.late && asked > LATE {
            self.late = true;
            (self.say)(&format!(
                "pid {pid}: the collection has not been seen to begin in {:.0} s: a thread may \
                 hold up the runtime's \
                 suspension (`perfusion dump {pid}` names it), or the machine is busy; Ctrl-C ends \
                 this",
                asked.as_secs_f64()
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SurveyMessages;
    use perfusion_heap::collect::SurveyProgress;

    #[test]
    fn threads_are_said_to_be_stopped_once_and_only_when_that_was_seen() {
        let mut said = Vec::new();
        let mut telling = SurveyMessages::begin(7, "shop", |line: &str| said.push(line.to_owned()));
        telling.see(SurveyProgress::default());
        for objects in [0, 5] {
            telling.see(SurveyProgress { objects, stopped: true });
        }
        assert!(said.len() == 2 && !said[0].contains("are stopped"), "{said:?}");
        assert!(said[1].contains("are stopped"), "{said:?}");
    }
}
