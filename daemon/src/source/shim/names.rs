//! What one region was asked, and what it answered: each address is asked once, one answer serves a whole method, and an unload
//! makes its code unknown again. Pure, and bounded whatever is asked or answered.

use profiler_protocol::record::NOT_NOW;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

/// Questions that may wait or be on their way.
const OPEN: usize = 65_536;
/// Method bodies, and addresses without one, that are remembered.
const REMEMBERED: usize = 262_144;
/// An answer that found the ring full does not come again by itself.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(1);
const TRIES: u8 = 4;

#[derive(Clone, Copy)]
enum Question {
    Waiting { tries: u8 },
    Sent { tries: u8, at: Instant },
}

#[derive(Clone, Copy)]
struct Body {
    bytes: u64,
    module_id: u64,
}

/// The questions of one region.
#[derive(Default)]
pub(super) struct NameBook {
    waiting: VecDeque<u64>,
    open: HashMap<u64, Question>,
    bodies: BTreeMap<u64, Body>,
    missing: HashSet<u64>,
}

impl NameBook {
    /// Queues a question unless it has been asked or answered. False when the queue is full.
    pub(super) fn ask(&mut self, address: u64) -> bool {
        if self.missing.contains(&address) || self.open.contains_key(&address) || self.covers(address) {
            return true;
        }
        if self.open.len() >= OPEN {
            return false;
        }
        self.open.insert(address, Question::Waiting { tries: 0 });
        self.waiting.push_back(address);
        true
    }

    fn covers(&self, address: u64) -> bool {
        let before = self.bodies.range(..=address).next_back();
        before.is_some_and(|(start, body)| address - start < body.bytes)
    }

    /// Up to `most` questions to send next.
    pub(super) fn next(&self, most: usize) -> Vec<u64> {
        self.waiting.iter().copied().take(most).collect()
    }

    /// The first `count` of [`NameBook::next`] were sent.
    pub(super) fn sent(&mut self, count: usize, now: Instant) {
        for address in self.waiting.drain(..count.min(self.waiting.len())) {
            if let Some(question) = self.open.get_mut(&address)
                && let Question::Waiting { tries } = *question
            {
                *question = Question::Sent { tries: tries + 1, at: now };
            }
        }
    }

    /// Queues questions again whose answer is overdue. Answers how many are given up.
    pub(super) fn repeat(&mut self, now: Instant) -> u64 {
        let mut given_up = 0;
        let waiting = &mut self.waiting;
        self.open.retain(|&address, question| match *question {
            Question::Sent { tries, at } if now.saturating_duration_since(at) >= ASK_AGAIN_AFTER => {
                if tries >= TRIES {
                    given_up += 1;
                    return false;
                }
                *question = Question::Waiting { tries };
                waiting.push_back(address);
                true
            }
            _ => true,
        });
        given_up
    }

    /// A method was named. False when nobody asked.
    pub(super) fn found(&mut self, asked: u64, module_id: u64, ranges: &[(u64, u32)]) -> bool {
        if self.open.remove(&asked).is_none() {
            return false;
        }
        for &(start, bytes) in ranges {
            if self.bodies.len() < REMEMBERED {
                self.bodies.insert(start, Body { bytes: u64::from(bytes), module_id });
            }
        }
        true
    }

    /// The runtime knows no method there, or cannot be asked now (then the address may be asked about again). False when nobody asked.
    pub(super) fn not_found(&mut self, asked: u64, hresult: i32) -> bool {
        let was_open = self.open.remove(&asked).is_some();
        if was_open && hresult != NOT_NOW && self.missing.len() < REMEMBERED {
            self.missing.insert(asked);
        }
        was_open
    }

    /// Code is gone: `ranges`, and all bodies of `module_id` unless it is 0. Answers all ranges that are gone.
    pub(super) fn unloaded(
        &mut self,
        module_id: u64,
        ranges: impl Iterator<Item = (u64, u64)>,
    ) -> Vec<(u64, u64)> {
        let mut gone: Vec<(u64, u64)> = ranges.filter(|(_, bytes)| *bytes > 0).collect();
        if module_id != 0 {
            gone.extend(
                self.bodies
                    .iter()
                    .filter(|(_, body)| body.module_id == module_id)
                    .map(|(&start, body)| (start, body.bytes)),
            );
        }
        let inside = |address: u64| gone.iter().any(|&(start, bytes)| address.wrapping_sub(start) < bytes);
        self.bodies.retain(|&start, body| body.module_id != module_id && !inside(start));
        self.missing.retain(|&address| !inside(address));
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::{ASK_AGAIN_AFTER, NOT_NOW, NameBook, OPEN, TRIES};
    use std::time::Instant;

    fn send_all(book: &mut NameBook, now: Instant) -> Vec<u64> {
        let next = book.next(usize::MAX);
        book.sent(next.len(), now);
        next
    }

    #[test]
    fn one_answer_serves_the_whole_method() {
        let now = Instant::now();
        let mut book = NameBook::default();
        assert!(book.ask(0x1010) && book.ask(0x1010) && book.ask(0x1020));
        assert_eq!(send_all(&mut book, now), [0x1010, 0x1020]);
        assert!(book.found(0x1010, 7, &[(0x1000, 0x100), (0x9000, 8)]));
        // The other question was on its way already and has its own answer.
        assert!(book.found(0x1020, 7, &[(0x1000, 0x100), (0x9000, 8)]));
        assert_eq!(book.open.len(), 0);
        assert!(book.ask(0x10ff) && book.ask(0x9007));
        assert!(book.next(10).is_empty());
        assert!(book.ask(0x1100));
        assert_eq!(book.next(10), [0x1100]);
    }

    #[test]
    fn an_answer_nobody_asked_for_is_refused() {
        let mut book = NameBook::default();
        assert!(!book.found(1, 1, &[(0, 100)]) && !book.not_found(2, -1));
        assert!(book.ask(1));
        assert_eq!(book.open.len(), 1);
    }

    #[test]
    fn what_cannot_be_asked_now_may_be_asked_later() {
        let mut book = NameBook::default();
        for hresult in [NOT_NOW, -1] {
            assert!(book.ask(0x1000));
            assert_eq!(book.next(10), [0x1000]);
            send_all(&mut book, Instant::now());
            assert!(book.not_found(0x1000, hresult));
        }
        assert!(book.ask(0x1000));
        assert!(book.next(10).is_empty(), "the runtime has said no");
    }

    #[test]
    fn unloaded_code_is_asked_about_again() {
        let now = Instant::now();
        let mut book = NameBook::default();
        for address in [0x1000, 0x2000, 0x3000] {
            assert!(book.ask(address));
        }
        send_all(&mut book, now);
        book.found(0x1000, 7, &[(0x1000, 16)]);
        book.found(0x2000, 8, &[(0x2000, 16)]);
        book.not_found(0x3000, -1);
        assert_eq!(book.unloaded(7, [(0x3000, 16), (0x5000, 0)].into_iter()), [(0x3000, 16), (0x1000, 16)]);
        for address in [0x1000, 0x2000, 0x3000] {
            assert!(book.ask(address));
        }
        assert_eq!(book.next(10), [0x1000, 0x3000]);
    }

    #[test]
    fn a_lost_answer_is_asked_for_again_and_given_up_in_the_end() {
        let mut now = Instant::now();
        let mut book = NameBook::default();
        book.ask(5);
        for _ in 0..TRIES {
            assert_eq!(send_all(&mut book, now), [5]);
            assert_eq!(book.repeat(now), 0);
            assert!(book.next(1).is_empty());
            now += ASK_AGAIN_AFTER;
            let given_up = book.repeat(now);
            assert_eq!(given_up, u64::from(book.open.is_empty()));
        }
        assert_eq!(book.open.len(), 0);
    }

    #[test]
    fn the_queue_has_an_end() {
        let mut book = NameBook::default();
        assert_eq!((0..=OPEN as u64).filter(|&address| !book.ask(address)).count(), 1);
    }
}
