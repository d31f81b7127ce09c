//! What a sink says of its receiver: a state when it begins, once, by service and cause, and its
//! sum when it ends. Numbers are no part of a cause: sizes and times differ from answer to answer.
//!
//! A state that comes and goes is said to; then it ends when it has not been there for some
//! minutes. Times are handed in, so that hours can be tested in a moment.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// A state that lasts is said again so often.
const SAY_AGAIN: Duration = Duration::from_secs(3600);
/// A state without an end of its own has ended when nothing of it has come for so long.
const QUIET: Duration = Duration::from_secs(600);
/// A state of a service of which nothing is taken any more is forgotten after this: a receiver may
/// ask for a wait of an hour.
const FORGOTTEN: Duration = Duration::from_secs(7200);
/// Whose fault something is shows within this time, or else it is said of the service that it
/// happened to.
pub(super) const SEEN_WITHIN: Duration = Duration::from_secs(120);
/// Services that are named for one cause. Of more the number is said.
const NAMED: usize = 5;
/// States that are told apart. What is more is counted under one.
const MOST_STATES: usize = 1000;
/// What these are counted under.
const OTHER_CAUSES: &str = "other causes of other services";
/// Characters of a cause.
const CAUSE_CHARACTERS: usize = 160;

/// Begins each line about what is wrong.
const WHAT: &str = "sending a profile";

/// When a state is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// When the receiver takes something.
    WhenTaken,
    /// When it takes something of this service.
    WhenServiceTaken,
    /// The same, of what may be the receiver's fault as well. It is said once that shows: when it
    /// happens to the service again, or the receiver takes something of another one. When it turns
    /// out to be the receiver's, it is the receiver's state.
    WhenWhoseIsSeen,
    /// When nothing of it has come for some minutes.
    WhenQuiet,
}

/// One thing that happened.
#[derive(Clone, Copy, Debug)]
pub struct DeliveryEvent<'a> {
    /// The service it is about; empty where it is about all.
    pub service: &'a str,
    /// What happened, as the receiver or the system says it.
    pub reason: &'a str,
    /// Such as a path, which is no part of the cause.
    pub detail: &'a str,
    /// What becomes of it.
    pub then: &'static str,
    /// How many are concerned, of what `unit` is the name of.
    pub count: u64,
    /// Such as `requests`.
    pub unit: &'static str,
    /// When the state is over.
    pub ends: Ends,
}

#[derive(Clone, Debug)]
struct FailureState {
    since: Instant,
    last: Instant,
    said: Instant,
    /// Of all of it, and since it was last said.
    count: u64,
    unit: &'static str,
    ends: Ends,
    /// It has ended then, and may come back.
    ended: Option<Instant>,
    /// It came back soon after it had ended.
    comes_and_goes: bool,
    /// A line of its own has named it.
    is_named: bool,
    /// Whose fault it is is not seen yet: nothing was said of it.
    is_open: bool,
    /// Its sum was said when the daemon ended.
    is_summed_up: bool,
    /// As they were given last.
    reason: String,
    then: &'static str,
    /// What its sum is about: the first reason, as it was given, and what became of it.
    summary: String,
}

impl FailureState {
    /// The line that begins it.
    fn begins(&self, service: &str) -> StateLine {
        let text = format!("{WHAT}: {}; {}", self.reason, self.then);
        StateLine { is_warning: true, service: service.to_owned(), text }
    }
}

/// Services with one cause that no line of their own has named.
#[derive(Default)]
struct MoreServices<'a> {
    services: u64,
    count: u64,
    unit: &'static str,
    /// Of the first of them.
    summary: &'a str,
}

impl<'a> MoreServices<'a> {
    fn add(&mut self, state: &'a FailureState) {
        if self.services == 0 {
            (self.unit, self.summary) = (state.unit, &state.summary);
        }
        self.services += 1;
        self.count = self.count.saturating_add(state.count);
    }
}

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateLine {
    /// Something is wrong; else it is over.
    pub is_warning: bool,
    /// The service; empty where it is about all.
    pub service: String,
    /// What is said.
    pub text: String,
}

/// How often one thing happened, for whoever asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CauseSum {
    /// The service; empty where it is about all.
    pub service: String,
    /// What happened, without numbers, and what became of it.
    pub cause: String,
    /// How often.
    pub count: u64,
    /// Such as `requests`.
    pub unit: &'static str,
    /// It goes on.
    pub lasts: bool,
}

/// The states of one sink.
#[derive(Clone, Debug, Default)]
pub struct States {
    states: BTreeMap<(String, String), FailureState>,
    lines: Vec<StateLine>,
}

impl States {
    /// Takes what happened.
    pub fn event(&mut self, event: DeliveryEvent<'_>, now: Instant) {
        // What was dropped and what waits for one reason are two states.
        let cause = format!("{}; {}", cause(event.reason), event.then);
        let mut key = (event.service.to_owned(), cause);
        let mut summary = format!("{}; {}", event.reason, event.then);
        if self.states.len() >= MOST_STATES && !self.states.contains_key(&key) {
            OTHER_CAUSES.clone_into(&mut summary);
            key = (String::new(), summary.clone());
        }
        let met_first = match event.ends {
            Ends::WhenTaken => self.become_the_receivers(&key.1, now),
            _ => None,
        };
        let is_named = event.service.is_empty() || self.named(&key.1) < NAMED;
        let is_open = event.ends == Ends::WhenWhoseIsSeen;
        let fresh = FailureState {
            since: now,
            last: now,
            said: now,
            count: 0,
            unit: event.unit,
            ends: event.ends,
            ended: Some(now),
            comes_and_goes: false,
            is_named: is_named && !is_open,
            is_open,
            is_summed_up: false,
            reason: String::new(),
            then: event.then,
            summary,
        };
        let is_new = !self.states.contains_key(&key);
        let state = self.states.entry(key).or_insert(fresh);
        let began = match state.ended.take() {
            // It happens again.
            None if state.is_open => {
                (state.is_open, state.is_named) = (false, is_named);
                true
            }
            None => false,
            Some(_) if is_new => !state.is_open,
            Some(_) if state.is_open => {
                (state.count, state.since) = (0, now);
                false
            }
            Some(_) => {
                state.comes_and_goes = true;
                // It was said once that it does.
                now.saturating_duration_since(state.said) >= SAY_AGAIN
            }
        };
        let first_return = state.comes_and_goes && state.count > 0 && state.ends != Ends::WhenQuiet;
        if let Some((count, since)) = met_first {
            (state.count, state.since) =
                (state.count.saturating_add(count), state.since.min(since));
        }
        state.count = state.count.saturating_add(event.count);
        state.last = now;
        state.unit = event.unit;
        state.then = event.then;
        event.reason.clone_into(&mut state.reason);
        let lasts = now.saturating_duration_since(state.said) >= SAY_AGAIN;
        let what = match event.detail {
            "" => event.reason.to_owned(),
            detail => format!("{} ({detail})", event.reason),
        };
        let text = if began && state.is_named {
            Some(format!("{WHAT}: {what}; {}", event.then))
        } else if first_return {
            state.ends = Ends::WhenQuiet;
            let is_said = state.is_named || event.service.is_empty();
            is_said.then(|| {
                format!(
                    "{WHAT}: {what}; {}. It comes and goes: it is said again when it is over",
                    event.then
                )
            })
        } else if lasts && (state.is_named || event.service.is_empty()) {
            Some(format!(
                "{WHAT}: {what}; {} ({} since it began, {} ago)",
                event.then,
                counted(state.count, state.unit),
                span(now.saturating_duration_since(state.since))
            ))
        } else {
            None
        };
        if let Some(text) = text {
            state.said = now;
            self.lines.push(StateLine {
                is_warning: true,
                service: event.service.to_owned(),
                text,
            });
        }
    }

    /// Services that are named for a cause now.
    fn named(&self, cause: &str) -> usize {
        let is_named = |((_, of), state): &(&(String, String), &FailureState)| {
            of == cause && state.is_named && state.ended.is_none()
        };
        self.states.iter().filter(is_named).count()
    }

    /// It is the receiver's fault, and so is what happened to services of which it was not seen
    /// whose it is. Answers how often it happened for this cause, and since when.
    fn become_the_receivers(&mut self, cause: &str, now: Instant) -> Option<(u64, Instant)> {
        let is_open = |state: &FailureState| state.is_open && state.ended.is_none();
        let keys =
            self.states.iter().filter(|(_, state)| is_open(state)).map(|(key, _)| key.clone());
        let mut of_cause = None;
        for key in keys.collect::<Vec<_>>() {
            let Some(state) = self.states.remove(&key) else { continue };
            if key.1 == cause {
                let (count, since) = of_cause.unwrap_or((0_u64, now));
                of_cause = Some((count.saturating_add(state.count), since.min(state.since)));
                continue;
            }
            // It ends with the others, and nothing was said of it.
            let of_receiver =
                FailureState { is_open: false, ends: Ends::WhenTaken, count: 0, ..state.clone() };
            let known = self.states.entry((String::new(), key.1)).or_insert(of_receiver);
            known.count = known.count.saturating_add(state.count);
        }
        of_cause
    }

    /// What was not said yet is of the services that it happened to, where that is so.
    fn is_of_services(&mut self, is_so: impl Fn(&str, &FailureState) -> bool, now: Instant) {
        let keys: Vec<(String, String)> = self
            .states
            .iter()
            .filter(|((service, _), state)| {
                state.is_open && state.ended.is_none() && is_so(service, state)
            })
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            let is_named = self.named(&key.1) < NAMED;
            let Some(state) = self.states.get_mut(&key) else { continue };
            (state.is_open, state.is_named) = (false, is_named);
            if is_named {
                state.said = now;
                let line = state.begins(&key.0);
                self.lines.push(line);
            }
        }
    }

    /// The receiver took something of a service.
    pub fn taken(&mut self, service: &str, now: Instant) {
        self.is_of_services(|of, _| of != service, now);
        self.end(now, |of, state| match state.ends {
            Ends::WhenTaken => true,
            Ends::WhenServiceTaken | Ends::WhenWhoseIsSeen => of == service,
            Ends::WhenQuiet => false,
        });
    }

    /// To be called now and then.
    pub fn look(&mut self, now: Instant) {
        self.is_of_services(
            |_, state| now.saturating_duration_since(state.last) >= SEEN_WITHIN,
            now,
        );
        let quiet = |at: Instant| now.saturating_duration_since(at) >= QUIET;
        self.end(now, |_, state| state.ends == Ends::WhenQuiet && quiet(state.last));
        // What waited was given up, or its service is gone: nothing of it will be taken.
        let is_gone = |state: &FailureState| {
            matches!(state.ends, Ends::WhenServiceTaken | Ends::WhenWhoseIsSeen)
                && now.saturating_duration_since(state.last) >= FORGOTTEN
        };
        for state in
            self.states.values_mut().filter(|state| state.ended.is_none() && is_gone(state))
        {
            state.ended = Some(now);
        }
        // Those that did not come back.
        self.states.retain(|_, state| state.ended.is_none_or(|ended| !quiet(ended)));
    }

    /// Nothing comes any more. What has not ended is said with its sum up to now; whether it is
    /// over nobody knows.
    pub fn close(&mut self, now: Instant) {
        let mut more: BTreeMap<&str, MoreServices<'_>> = BTreeMap::new();
        let mut lines = Vec::new();
        for ((service, cause), state) in &mut self.states {
            if state.ended.is_some() || std::mem::replace(&mut state.is_summed_up, true) {
                continue;
            }
            if !state.is_named && !state.is_open && !service.is_empty() {
                more.entry(cause).or_default().add(state);
                continue;
            }
            let until = if state.ends == Ends::WhenQuiet { state.last } else { now };
            let lasted = span(until.saturating_duration_since(state.since));
            let text = format!(
                "up to the end: {} in {lasted} of this: {}",
                counted(state.count, state.unit),
                state.summary
            );
            lines.push(StateLine { is_warning: false, service: service.clone(), text });
        }
        for MoreServices { services, count, unit, summary } in more.into_values() {
            let text = format!(
                "up to the end: {} of {} of this: {summary}",
                counted(count, unit),
                counted(services, "more services")
            );
            lines.push(StateLine { is_warning: false, service: String::new(), text });
        }
        self.lines.append(&mut lines);
    }

    fn end(&mut self, now: Instant, is_over: impl Fn(&str, &FailureState) -> bool) {
        // By cause: what was said of each service, and of how many more.
        let mut more: BTreeMap<&str, MoreServices<'_>> = BTreeMap::new();
        // What works again: the receiver, whose name is empty, and services.
        let mut works: BTreeMap<&str, (u64, Duration)> = BTreeMap::new();
        for ((service, cause), state) in &mut self.states {
            if state.ended.is_some() || !is_over(service, state) {
                continue;
            }
            state.ended = Some(now);
            let lasted = span(state.last.saturating_duration_since(state.since));
            if state.ends == Ends::WhenQuiet {
                if state.is_named {
                    let text = format!(
                        "{} in {lasted} of this, which is over: {}",
                        counted(state.count, state.unit),
                        state.summary
                    );
                    self.lines.push(StateLine {
                        is_warning: false,
                        service: service.clone(),
                        text,
                    });
                } else if !service.is_empty() {
                    more.entry(cause).or_default().add(state);
                }
                continue;
            }
            // What no line has begun, none ends: of more services than are named, and of what
            // happened once.
            if !state.is_named {
                continue;
            }
            let (attempts, longest) = works.entry(service).or_default();
            *attempts += state.count;
            *longest = (*longest).max(now.saturating_duration_since(state.since));
        }
        for MoreServices { services, count, unit, summary } in more.into_values() {
            let text = format!(
                "{} of {} of this, which is over: {summary}",
                counted(count, unit),
                counted(services, "more services")
            );
            self.lines.push(StateLine { is_warning: false, service: String::new(), text });
        }
        for (service, (attempts, lasted)) in works {
            let text = format!(
                "sending profiles works again, after {} that failed in {}",
                counted(attempts, "attempts"),
                span(lasted)
            );
            self.lines.push(StateLine { is_warning: false, service: service.to_owned(), text });
        }
    }

    /// What is to be said now.
    pub fn lines(&mut self) -> Vec<StateLine> {
        std::mem::take(&mut self.lines)
    }

    /// All that happened lately, by service and cause.
    pub fn sums(&self) -> impl Iterator<Item = CauseSum> {
        self.states.iter().map(|((service, cause), state)| CauseSum {
            service: service.clone(),
            cause: cause.clone(),
            count: state.count,
            unit: state.unit,
            lasts: state.ended.is_none(),
        })
    }

    /// States of which nothing was said, since it is not seen yet whose they are.
    #[cfg(test)]
    pub fn unsaid(&self) -> usize {
        self.states.values().filter(|state| state.is_open).count()
    }

    /// As they were given last.
    #[cfg(test)]
    pub fn reasons(&self) -> Vec<String> {
        self.states.values().map(|state| state.reason.clone()).collect()
    }

    /// Why nothing is taken now, where that is so.
    #[must_use]
    pub fn trouble(&self) -> Option<&str> {
        let lasts = |state: &FailureState| state.ended.is_none() && state.ends != Ends::WhenQuiet;
        let mut found = self.states.iter().filter(|(_, state)| lasts(state));
        found.next().map(|(_, state)| state.reason.as_str())
    }
}

/// Says lines about a sink.
pub fn say(sink: &str, lines: Vec<StateLine>) {
    for StateLine { is_warning, service, text } in lines {
        match (is_warning, service.is_empty()) {
            (true, true) => tracing::warn!(target: SAID, sink, "{text}"),
            (true, false) => tracing::warn!(target: SAID, sink, service, "{text}"),
            (false, true) => tracing::info!(target: SAID, sink, "{text}"),
            (false, false) => tracing::info!(target: SAID, sink, service, "{text}"),
        }
    }
}

/// Target of lines about states. There are few of them by their own rule, so that the log's limit
/// of lines of one place is not for them: one receiver's would be in the way of another's.
pub const SAID: &str = "perfusion::receivers";

/// A reason without its numbers: `413: limit 65536` and `413: limit 70000` are one cause. A word
/// with a digit in it is a number, too, such as the id of a request in hexadecimal. The number of a
/// status in front of the text stays.
fn cause(reason: &str) -> String {
    let (head, text) = reason.split_at(reason.find(": ").unwrap_or(0));
    let is_between = |letter: char| !(letter.is_alphanumeric() || letter == '-' || letter == '_');
    let mut cause = head.to_owned();
    for part in text.split_inclusive(is_between) {
        let word = part.trim_end_matches(is_between);
        if word.bytes().any(|byte| byte.is_ascii_digit()) {
            cause.push('#');
            cause.extend(part.chars().skip(word.chars().count()));
        } else {
            cause.push_str(part);
        }
    }
    cause.chars().take(CAUSE_CHARACTERS).collect()
}

/// A number of things, whose name is given in the plural.
pub fn counted(count: u64, things: &str) -> String {
    let one = things.strip_suffix('s').filter(|_| count == 1);
    format!("{count} {}", one.unwrap_or(things))
}

/// A time in words, to the second.
pub(super) fn span(time: Duration) -> String {
    let (minutes, seconds) = (time.as_secs() / 60, time.as_secs() % 60);
    let mut text = String::new();
    // Writing to a String cannot fail.
    match (minutes / 60, minutes % 60) {
        (0, 0) => write!(text, "{seconds} s"),
        (0, minutes) => write!(text, "{minutes} min {seconds} s"),
        (hours, minutes) => write!(text, "{hours} h {minutes} min"),
    }
    .ok();
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event<'a>(service: &'a str, reason: &'a str, ends: Ends) -> DeliveryEvent<'a> {
        DeliveryEvent {
            service,
            reason,
            detail: "",
            then: "it is dropped",
            count: 1,
            unit: "requests",
            ends,
        }
    }

    fn texts(states: &mut States) -> Vec<String> {
        let line = |line: StateLine| format!("{}: {}", line.service, line.text);
        states.lines().into_iter().map(line).collect()
    }

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn a_service_that_is_refused_in_each_window_is_said_once_and_summed_up_when_it_is_over() {
        let (mut states, start) = (States::default(), Instant::now());
        for window in 0..50_u32 {
            let now = start + window * MINUTE;
            let reason =
                format!("the receiver answers 413: {} bytes are too many", 5_000_000 + window);
            states.event(event("big", &reason, Ends::WhenQuiet), now);
            states.taken("small", now);
            states.taken("big", now);
            states.look(now);
        }
        let said = texts(&mut states);
        assert_eq!(
            said,
            ["big: sending a profile: the receiver answers 413: 5000000 bytes are too many; it \
                 is dropped"]
        );
        states.look(start + 49 * MINUTE + QUIET);
        let said = texts(&mut states);
        assert_eq!(
            said,
            ["big: 50 requests in 49 min 0 s of this, which is over: \
              the receiver answers 413: 5000000 bytes are too many; it is dropped"]
        );
        states.look(start + 49 * MINUTE + QUIET * 2);
        assert_eq!((states.sums().count(), texts(&mut states).len()), (0, 0));
    }

    #[test]
    fn a_sum_has_the_text_that_was_seen_first_and_not_the_key_of_its_group() {
        let (mut states, start) = (States::default(), Instant::now());
        let away = |at: u32| {
            format!("a:4317: Connection refused (os error {}) at [2001:db8::{at}]", 110 + at)
        };
        for (at, service) in (1..).zip(["a", "b", "c", "d", "e", "f"]) {
            states.event(event(service, &away(at), Ends::WhenQuiet), start);
        }
        let (first, sixth) = (away(1), away(6));
        states.event(event("a", &away(7), Ends::WhenQuiet), start);
        texts(&mut states);
        let mut closed = states.clone();
        closed.close(start);
        states.look(start + QUIET);
        for (said, ends) in [(texts(&mut closed), ""), (texts(&mut states), ", which is over")] {
            assert_eq!(said.len(), NAMED + 1, "{said:#?}");
            assert!(said.iter().all(|line| !line.contains('#')), "{said:#?}");
            let words = format!("2 requests in 0 s of this{ends}: {first}; it is dropped");
            assert!(said[0].ends_with(&words), "{said:#?}");
            let words =
                format!("1 request of 1 more service of this{ends}: {sixth}; it is dropped");
            assert!(said[NAMED].ends_with(&words), "{said:#?}");
        }
    }

    #[test]
    fn a_receiver_that_was_away_is_said_to_be_and_to_work_again() {
        let (mut states, start) = (States::default(), Instant::now());
        let away =
            |service| event(service, "a:4317: Connection refused (os error 111)", Ends::WhenTaken);
        for second in 0..100 {
            states.event(away(""), start + Duration::from_secs(second));
        }
        assert_eq!(states.trouble(), Some("a:4317: Connection refused (os error 111)"));
        assert_eq!(texts(&mut states).len(), 1);
        states.taken("any", start + Duration::from_secs(100));
        assert_eq!(states.trouble(), None);
        let said = texts(&mut states);
        assert_eq!(
            said,
            [": sending profiles works again, after 100 attempts that failed in 1 min 40 s"]
        );
    }

    #[test]
    fn what_comes_and_goes_is_said_to_and_not_at_each_turn() {
        let (mut states, start) = (States::default(), Instant::now());
        let mut now = start;
        for _ in 0..500 {
            states
                .event(event("web", "the receiver answers 503: busy", Ends::WhenWhoseIsSeen), now);
            states.taken("shop", now);
            states.taken("web", now + Duration::from_secs(1));
            now += Duration::from_secs(7);
        }
        let said = texts(&mut states);
        assert_eq!(said.len(), 3, "{said:#?}");
        assert!(said.iter().all(|line| line.starts_with("web: ")), "{said:#?}");
        assert!(said[1].contains("works again") && said[2].contains("comes and goes"), "{said:#?}");
        states.look(now + QUIET);
        let said = texts(&mut states);
        assert!(said.len() == 1 && said[0].contains("500 requests in 58 min"), "{said:#?}");
    }

    #[test]
    fn what_lasts_is_said_again_each_hour() {
        let (mut states, start) = (States::default(), Instant::now());
        for minute in 0..=180 {
            let now = start + MINUTE * minute;
            states.event(event("", "nobody is there", Ends::WhenTaken), now);
        }
        let said = texts(&mut states);
        assert_eq!(said.len(), 4, "{said:#?}");
        assert!(said[3].contains("181 requests since it began, 3 h 0 min ago"), "{said:#?}");
    }

    #[test]
    fn many_services_with_one_cause_are_few_lines() {
        let (mut states, start) = (States::default(), Instant::now());
        for number in 0..200 {
            let service = format!("service {number}");
            states.event(event(&service, "the receiver answers 400: no", Ends::WhenQuiet), start);
        }
        assert_eq!((texts(&mut states).len(), states.sums().count()), (NAMED, 200));
        states.look(start + QUIET);
        let said = texts(&mut states);
        assert_eq!(said.len(), NAMED + 1, "{said:#?}");
        assert!(said[NAMED].contains("195 requests of 195 more services"), "{said:#?}");
        // Another cause has lines of its own.
        states.event(event("service 7", "the receiver answers 413: no", Ends::WhenQuiet), start);
        assert_eq!(texts(&mut states).len(), 1);
    }

    #[test]
    fn what_is_the_receivers_fault_is_said_of_the_receiver_and_so_is_its_end() {
        let (mut states, start) = (States::default(), Instant::now());
        states.event(event("web", "the receiver reset it", Ends::WhenWhoseIsSeen), start);
        states.event(event("shop", "no answer in time", Ends::WhenWhoseIsSeen), start);
        assert_eq!((texts(&mut states).len(), states.trouble().is_some()), (0, true));
        states.event(event("", "no answer in time", Ends::WhenTaken), start + MINUTE);
        assert_eq!(texts(&mut states), [": sending a profile: no answer in time; it is dropped"]);
        assert_eq!(
            states.sums().map(|sum| (sum.service, sum.count)).collect::<Vec<_>>(),
            [(String::new(), 2), (String::new(), 1)]
        );
        for service in ["cart", "web", "shop"] {
            states.taken(service, start + 2 * MINUTE);
        }
        let said = texts(&mut states);
        assert_eq!(
            said,
            [": sending profiles works again, after 2 attempts that failed in 2 min 0 s"]
        );
    }

    #[test]
    fn what_is_one_services_is_said_of_the_service_and_so_is_its_end() {
        let fails = |states: &mut States, at| {
            states.event(event("web", "the receiver answers 429: no", Ends::WhenWhoseIsSeen), at);
        };
        let start = Instant::now();
        let begins = ["web: sending a profile: the receiver answers 429: no; it is dropped"];
        // Another one is taken, it fails again, or nothing else comes.
        let (mut states, mut again, mut alone) =
            (States::default(), States::default(), States::default());
        fails(&mut states, start);
        states.taken("shop", start);
        assert_eq!(texts(&mut states), begins);
        fails(&mut again, start);
        fails(&mut again, start + MINUTE);
        assert_eq!(texts(&mut again), begins);
        fails(&mut alone, start);
        alone.look(start + MINUTE);
        assert_eq!(texts(&mut alone).len(), 0);
        alone.look(start + SEEN_WITHIN);
        assert_eq!(texts(&mut alone), begins);
        // The receiver fails meanwhile: that is another state, and each has its end.
        states.event(event("", "refused", Ends::WhenTaken), start + MINUTE);
        assert_eq!(texts(&mut states), [": sending a profile: refused; it is dropped"]);
        states.taken("shop", start + 2 * MINUTE);
        assert_eq!(
            texts(&mut states),
            [": sending profiles works again, after 1 attempt that failed in 1 min 0 s"]
        );
        states.taken("web", start + 2 * MINUTE);
        assert_eq!(
            texts(&mut states),
            ["web: sending profiles works again, after 1 attempt that failed in 2 min 0 s"]
        );
    }

    #[test]
    fn a_failure_that_does_not_come_back_is_not_said() {
        let (mut states, start) = (States::default(), Instant::now());
        states.event(event("web", "the receiver answers 503: busy", Ends::WhenWhoseIsSeen), start);
        states.taken("web", start + Duration::from_secs(1));
        states.event(
            event("web", "the receiver answers 503: busy", Ends::WhenWhoseIsSeen),
            start + MINUTE,
        );
        states.taken("web", start + MINUTE);
        states.look(start + QUIET * 3);
        assert_eq!((texts(&mut states), states.sums().count()), (vec![], 0));
    }

    #[test]
    fn what_has_not_ended_when_the_daemon_does_is_summed_up_once_and_not_said_to_be_over() {
        let (mut states, start) = (States::default(), Instant::now());
        for minute in 0..3 {
            let now = start + MINUTE * minute;
            states.event(event("", "no answer in time", Ends::WhenTaken), now);
            states.event(event("web", "it answers 413: no", Ends::WhenQuiet), now);
            states.event(event("shop", "it answers 429: no", Ends::WhenServiceTaken), now);
        }
        states
            .event(event("cart", "it answers 503: no", Ends::WhenWhoseIsSeen), start + MINUTE * 3);
        texts(&mut states);
        states.close(start + MINUTE * 3);
        let said = texts(&mut states);
        let expected = [
            ": up to the end: 3 requests in 3 min 0 s of this: no answer in time; it is dropped",
            "cart: up to the end: 1 request in 0 s of this: it answers 503: no; it is dropped",
            "shop: up to the end: 3 requests in 3 min 0 s of this: it answers 429: no; it is \
             dropped",
            "web: up to the end: 3 requests in 2 min 0 s of this: it answers 413: no; it is \
             dropped",
        ];
        assert_eq!(said, expected);
        states.close(start + MINUTE * 4);
        assert_eq!(texts(&mut states).len(), 0);
    }

    #[test]
    fn a_receivers_failure_that_a_service_met_first_is_said_again_each_hour() {
        let (mut states, start) = (States::default(), Instant::now());
        states.event(event("web", "the receiver answers 503: busy", Ends::WhenWhoseIsSeen), start);
        for minute in 0..=180 {
            let now = start + MINUTE * minute;
            states.event(event("", "the receiver answers 503: busy", Ends::WhenTaken), now);
        }
        let said = texts(&mut states);
        assert_eq!(said.len(), 4, "{said:#?}");
    }

    #[test]
    fn a_state_of_a_service_that_is_gone_has_an_end() {
        let (mut states, start) = (States::default(), Instant::now());
        states.event(
            event("web", "the receiver answers 429: slow down", Ends::WhenServiceTaken),
            start,
        );
        states.taken("shop", start + MINUTE);
        states.look(start + MINUTE);
        assert!(states.trouble().is_some());
        states.look(start + FORGOTTEN);
        assert_eq!(states.trouble(), None);
        states.look(start + FORGOTTEN + QUIET);
        assert_eq!(states.sums().count(), 0);
    }

    #[test]
    fn services_that_come_and_go_together_are_few_lines() {
        let (mut states, start) = (States::default(), Instant::now());
        for turn in 0..3_u32 {
            let now = start + MINUTE * turn;
            let services: Vec<String> =
                (0..100).map(|number| format!("service {number}")).collect();
            for service in &services {
                states.event(
                    event(service, "the receiver answers 503: busy", Ends::WhenWhoseIsSeen),
                    now,
                );
            }
            states.taken("other", now);
            services.iter().for_each(|service| states.taken(service, now));
        }
        let said = texts(&mut states);
        assert_eq!(said.len(), 3 * NAMED, "{said:#?}");
    }

    #[test]
    fn numbers_are_no_part_of_a_cause_but_the_status() {
        assert_eq!(
            cause("the receiver answers 413: limit 65536 of 7"),
            "the receiver answers 413: limit # of #"
        );
        assert_eq!(cause("message of 17 bytes"), "message of # bytes");
        assert_eq!(cause("a:4317: refused (111)"), "a:4317: refused (#)");
        let ids = ["3f2a1b9c-dead-4bee-a1b2-c3d4e5f60718", "0badcafe-1111-4bee-a1b2-beefbeefbeef"];
        for id in ids {
            assert_eq!(
                cause(&format!("it answers 400: request {id}: no")),
                "it answers 400: request #: no"
            );
        }
    }
}
