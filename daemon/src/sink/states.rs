//! What a sink says of its receiver: a state when it begins, once, by service and cause, and its sum
//! when it ends. Numbers are no part of a cause: sizes and times differ from answer to answer.
//!
//! A state that comes and goes is said to; then it ends when it has not been there for some minutes.
//! Times are handed in, so that hours can be tested in a moment.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// A state that lasts is said again so often.
const SAY_AGAIN: Duration = Duration::from_secs(3600);
/// A state without an end of its own has ended when nothing of it has come for so long.
const QUIET: Duration = Duration::from_secs(600);
/// A state of a service of which nothing is taken any more is forgotten after this: a receiver may ask
/// for a wait of an hour.
const FORGOTTEN: Duration = Duration::from_secs(7200);
/// Services that are named for one cause. Of more the number is said.
const NAMED: usize = 5;
/// States that are told apart. What is more is counted under one.
const MOST_STATES: usize = 1000;
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
    /// When nothing of it has come for some minutes.
    WhenQuiet,
}

/// One thing that happened.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
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
struct State {
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
    /// As it was given last.
    reason: String,
}

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Something is wrong; else it is over.
    pub is_warning: bool,
    /// The service; empty where it is about all.
    pub service: String,
    /// What is said.
    pub text: String,
}

/// How often one thing happened, for whoever asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sum {
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
#[derive(Debug, Default)]
pub struct States {
    states: BTreeMap<(String, String), State>,
    lines: Vec<Line>,
}

impl States {
    /// Takes what happened.
    pub fn event(&mut self, event: Event<'_>, now: Instant) {
        // What was dropped and what waits for one reason are two states.
        let cause = format!("{}; {}", cause(event.reason), event.then);
        let mut key = (event.service.to_owned(), cause);
        if self.states.len() >= MOST_STATES && !self.states.contains_key(&key) {
            key = (String::new(), "other causes of other services".to_owned());
        }
        let of_cause = |(known, state): (&(String, String), &State)| {
            known.1 == key.1 && state.is_named && state.ended.is_none()
        };
        let named = self.states.iter().filter(|entry| of_cause(*entry)).count();
        // The receiver's own failure was said of the service that met it first.
        let is_known = event.service.is_empty() && named > 0;
        let fresh = State {
            since: now,
            last: now,
            said: now,
            count: 0,
            unit: event.unit,
            ends: event.ends,
            ended: Some(now),
            comes_and_goes: false,
            is_named: named < NAMED && !is_known,
            reason: String::new(),
        };
        let is_new = !self.states.contains_key(&key);
        let state = self.states.entry(key).or_insert(fresh);
        let began = match state.ended.take() {
            None => false,
            Some(_) if is_new => true,
            Some(_) => {
                state.comes_and_goes = true;
                // It was said once that it does.
                now.saturating_duration_since(state.said) >= SAY_AGAIN
            }
        };
        let first_return = state.comes_and_goes && state.count > 0 && state.ends != Ends::WhenQuiet;
        state.count = state.count.saturating_add(event.count);
        state.last = now;
        state.unit = event.unit;
        event.reason.clone_into(&mut state.reason);
        let lasts = now.saturating_duration_since(state.said) >= SAY_AGAIN;
        let what = match event.detail {
            "" => event.reason.to_owned(),
            detail => format!("{} ({detail})", event.reason),
        };
        let text = if began && !is_known && state.is_named {
            Some(format!("{WHAT}: {what}; {}", event.then))
        } else if first_return {
            state.ends = Ends::WhenQuiet;
            let is_said = state.is_named || event.service.is_empty();
            is_said.then(|| {
                format!("{WHAT}: {what}; {}. It comes and goes: it is said again when it is over", event.then)
            })
        } else if lasts && (state.is_named || event.service.is_empty()) {
            Some(format!(
                "{WHAT}: {what}; {} ({} {} since it began, {} ago)",
                event.then,
                state.count,
                state.unit,
                span(now.saturating_duration_since(state.since))
            ))
        } else {
            None
        };
        if let Some(text) = text {
            state.said = now;
            self.lines.push(Line { is_warning: true, service: event.service.to_owned(), text });
        }
    }

    /// The receiver took something of a service.
    pub fn taken(&mut self, service: &str, now: Instant) {
        self.end(now, |of, state| match state.ends {
            Ends::WhenTaken => true,
            Ends::WhenServiceTaken => of == service,
            Ends::WhenQuiet => false,
        });
    }

    /// To be called now and then.
    pub fn look(&mut self, now: Instant) {
        let quiet = |at: Instant| now.saturating_duration_since(at) >= QUIET;
        self.end(now, |_, state| state.ends == Ends::WhenQuiet && quiet(state.last));
        // What waited was given up, or its service is gone: nothing of it will be taken.
        let is_gone = |state: &State| {
            state.ends == Ends::WhenServiceTaken && now.saturating_duration_since(state.last) >= FORGOTTEN
        };
        for state in self.states.values_mut().filter(|state| state.ended.is_none() && is_gone(state)) {
            state.ended = Some(now);
        }
        // Those that did not come back.
        self.states.retain(|_, state| state.ended.is_none_or(|ended| !quiet(ended)));
    }

    /// Nothing comes any more.
    pub fn close(&mut self, now: Instant) {
        self.end(now, |_, state| state.ends == Ends::WhenQuiet);
    }

    fn end(&mut self, now: Instant, is_over: impl Fn(&str, &State) -> bool) {
        // By cause: what was said of each service, and of how many more.
        let mut more: BTreeMap<&str, (u64, u64, &'static str)> = BTreeMap::new();
        let mut works = None;
        for ((service, cause), state) in &mut self.states {
            if state.ended.is_some() || !is_over(service, state) {
                continue;
            }
            state.ended = Some(now);
            let lasted = span(state.last.saturating_duration_since(state.since));
            if state.ends == Ends::WhenQuiet {
                if state.is_named {
                    let text =
                        format!("{} {} in {lasted} of this, which is over: {cause}", state.count, state.unit);
                    self.lines.push(Line { is_warning: false, service: service.clone(), text });
                } else if !service.is_empty() {
                    let (services, count, _) = more.entry(cause).or_insert((0, 0, state.unit));
                    (*services, *count) = (*services + 1, *count + state.count);
                }
                continue;
            }
            // Of more services than are named no line says when each works again.
            if !state.is_named && !service.is_empty() {
                continue;
            }
            let (attempts, longest, _) = works.get_or_insert((0_u64, Duration::ZERO, String::new()));
            *attempts += state.count;
            *longest = (*longest).max(now.saturating_duration_since(state.since));
            if let Some((.., of)) = &mut works
                && state.ends == Ends::WhenServiceTaken
            {
                service.clone_into(of);
            }
        }
        for (cause, (services, count, unit)) in more {
            let text = format!("{count} {unit} of {services} more services of this, which is over: {cause}");
            self.lines.push(Line { is_warning: false, service: String::new(), text });
        }
        if let Some((attempts, lasted, service)) = works {
            let text = format!(
                "sending profiles works again, after {attempts} attempts that failed in {}",
                span(lasted)
            );
            self.lines.push(Line { is_warning: false, service, text });
        }
    }

    /// What is to be said now.
    pub fn lines(&mut self) -> Vec<Line> {
        std::mem::take(&mut self.lines)
    }

    /// All that happened lately, by service and cause.
    pub fn sums(&self) -> impl Iterator<Item = Sum> {
        self.states.iter().map(|((service, cause), state)| Sum {
            service: service.clone(),
            cause: cause.clone(),
            count: state.count,
            unit: state.unit,
            lasts: state.ended.is_none(),
        })
    }

    /// As they were given last.
    #[cfg(test)]
    pub fn reasons(&self) -> Vec<String> {
        self.states.values().map(|state| state.reason.clone()).collect()
    }

    /// Why nothing is taken now, where that is so.
    #[must_use]
    pub fn trouble(&self) -> Option<&str> {
        let lasts = |state: &State| state.ended.is_none() && state.ends != Ends::WhenQuiet;
        let mut found = self.states.iter().filter(|(_, state)| lasts(state));
        found.next().map(|(_, state)| state.reason.as_str())
    }
}

/// Says lines about a sink.
pub fn say(sink: &str, lines: Vec<Line>) {
    for Line { is_warning, service, text } in lines {
        match (is_warning, service.is_empty()) {
            (true, true) => tracing::warn!(target: SAID, sink, "{text}"),
            (true, false) => tracing::warn!(target: SAID, sink, service, "{text}"),
            (false, true) => tracing::info!(target: SAID, sink, "{text}"),
            (false, false) => tracing::info!(target: SAID, sink, service, "{text}"),
        }
    }
}

/// Target of lines about states. There are few of them by their own rule, so that the log's limit of
/// lines of one place is not for them: one receiver's would be in the way of another's.
pub const SAID: &str = "perfusion::receivers";

/// A reason without its numbers: `413: limit 65536` and `413: limit 70000` are one cause. A word with
/// a digit in it is a number, too, such as the id of a request in hexadecimal. The number of a status
/// in front of the text stays.
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

/// A time in words, to the second.
fn span(time: Duration) -> String {
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

    fn event<'a>(service: &'a str, reason: &'a str, ends: Ends) -> Event<'a> {
        Event { service, reason, detail: "", then: "it is dropped", count: 1, unit: "requests", ends }
    }

    fn texts(states: &mut States) -> Vec<String> {
        let line = |line: Line| format!("{}: {}", line.service, line.text);
        states.lines().into_iter().map(line).collect()
    }

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn a_service_that_is_refused_in_each_window_is_said_once_and_summed_up_when_it_is_over() {
        let (mut states, start) = (States::default(), Instant::now());
        for window in 0..50_u32 {
            let now = start + window * MINUTE;
            let reason = format!("the receiver answers 413: {} bytes are too many", 5_000_000 + window);
            states.event(event("big", &reason, Ends::WhenQuiet), now);
            states.taken("small", now);
            states.taken("big", now);
            states.look(now);
        }
        let said = texts(&mut states);
        assert_eq!(
            said,
            ["big: sending a profile: the receiver answers 413: 5000000 bytes are too many; it is dropped"]
        );
        states.look(start + 49 * MINUTE + QUIET);
        let said = texts(&mut states);
        assert_eq!(
            said,
            ["big: 50 requests in 49 min 0 s of this, which is over: \
              the receiver answers 413: # bytes are too many; it is dropped"]
        );
        states.look(start + 49 * MINUTE + QUIET * 2);
        assert_eq!((states.sums().count(), texts(&mut states).len()), (0, 0));
    }

    #[test]
    fn a_receiver_that_was_away_is_said_to_be_and_to_work_again() {
        let (mut states, start) = (States::default(), Instant::now());
        let away = |service| event(service, "a:4317: Connection refused (os error 111)", Ends::WhenTaken);
        for second in 0..100 {
            states.event(away(""), start + Duration::from_secs(second));
        }
        assert_eq!(states.trouble(), Some("a:4317: Connection refused (os error 111)"));
        assert_eq!(texts(&mut states).len(), 1);
        states.taken("any", start + Duration::from_secs(100));
        assert_eq!(states.trouble(), None);
        let said = texts(&mut states);
        assert_eq!(said, [": sending profiles works again, after 100 attempts that failed in 1 min 40 s"]);
    }

    #[test]
    fn what_comes_and_goes_is_said_to_and_not_at_each_turn() {
        let (mut states, start) = (States::default(), Instant::now());
        let mut now = start;
        for _ in 0..500 {
            states.event(event("web", "the receiver answers 503: busy", Ends::WhenServiceTaken), now);
            states.taken("web", now + Duration::from_secs(1));
            now += Duration::from_secs(7);
        }
        let said = texts(&mut states);
        assert_eq!(said.len(), 3, "{said:#?}");
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
        states.close(start + MINUTE);
        let said = texts(&mut states);
        assert_eq!(said.len(), NAMED + 1, "{said:#?}");
        assert!(said[NAMED].contains("195 requests of 195 more services"), "{said:#?}");
        // Another cause has lines of its own.
        states.event(event("service 7", "the receiver answers 413: no", Ends::WhenQuiet), start);
        assert_eq!(texts(&mut states).len(), 1);
    }

    #[test]
    fn a_failure_that_turns_out_to_be_the_receivers_is_not_said_twice() {
        let (mut states, start) = (States::default(), Instant::now());
        let reason = "the receiver answers 503: busy";
        states.event(event("web", reason, Ends::WhenServiceTaken), start);
        states.event(event("", reason, Ends::WhenTaken), start);
        assert_eq!(texts(&mut states).len(), 1);
        states.taken("shop", start + MINUTE);
        states.taken("web", start + MINUTE);
        assert!(texts(&mut states)[0].contains("works again"));
    }

    #[test]
    fn a_receivers_failure_that_a_service_met_first_is_said_again_each_hour() {
        let (mut states, start) = (States::default(), Instant::now());
        states.event(event("web", "the receiver answers 503: busy", Ends::WhenServiceTaken), start);
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
        states.event(event("web", "the receiver answers 429: slow down", Ends::WhenServiceTaken), start);
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
            let services: Vec<String> = (0..100).map(|number| format!("service {number}")).collect();
            for service in &services {
                states.event(event(service, "the receiver answers 503: busy", Ends::WhenServiceTaken), now);
            }
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
            assert_eq!(cause(&format!("it answers 400: request {id}: no")), "it answers 400: request #: no");
        }
    }
}
