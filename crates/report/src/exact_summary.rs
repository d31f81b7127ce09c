//! An [`ExactAccount`] for a person: from what it is and whether it is whole, through what it cost
//! and what collections did, to the types.

use super::top::fit;
use perfusion_dotnet::exact::table::TORN;
use perfusion_dotnet::exact::{
    Ending, ExactAccount, ExactCollection, ExactCount, ExactProcess, ExactType, Lifetime,
};
use perfusion_model::text::clean;
use perfusion_model::units::{counted, grouped, human, percent};
use perfusion_pprof::{EXACT_PREFIX, LOST_PREFIX};
use profiler_protocol::exact::LOSSES;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// What one object costs beyond an ordinary allocation when it is made, the runtime's part
/// included, at the least and at the most: *exact* less *plain* and less our work in collections,
/// which each recording measures itself, as in the table in docs/exact-mode.md and in the loop
/// below it. Most of it is the runtime's own, and by how much it slows down a program depends on
/// the processor, and on what else is in its caches.
fn object_ns(runtime: &str) -> [f64; 2] {
    match runtime.split('.').next().and_then(|major| major.parse::<u32>().ok()) {
        Some(..=8) => [44.0, 80.0],
        Some(9) => [45.0, 80.0],
        _ => [50.0, 100.0],
    }
}

/// What the runtime makes without telling any profiler, where nobody has looked for it.
pub const UNTOLD: &str = "values boxed since the last collection, what reflection and marshalling \
     made since, and combined delegates: .NET 10 tells no profiler of them, and only a collection \
                          or the end of the program finds them (docs/exact-mode.md)";

/// What an object costs an ordinary run at the least.
const PLAIN_NS: f64 = 6.0;

/// The size of the tables.
#[derive(Clone, Copy, Debug)]
pub struct SummaryOptions {
    /// Rows of each table.
    pub rows: usize,
    /// Columns of the terminal; none: names are not cut.
    pub width: Option<usize>,
}

fn count(number: u64) -> String {
    grouped(i64::try_from(number).unwrap_or(i64::MAX))
}

fn bytes(number: u64) -> String {
    human(i64::try_from(number).unwrap_or(i64::MAX), "bytes")
}

fn time(ns: u64) -> String {
    human(i64::try_from(ns).unwrap_or(i64::MAX), "nanoseconds")
}

fn share(part: u64, whole: u64) -> String {
    percent(i64::try_from(part).unwrap_or(i64::MAX), i64::try_from(whole).unwrap_or(i64::MAX))
}

fn both(of: ExactCount) -> String {
    format!("{} ({})", count(of.objects), bytes(of.bytes))
}

/// The whole text.
#[must_use]
pub fn text(account: &ExactAccount, options: SummaryOptions) -> String {
    let mut text = String::new();
    // The file may be anybody's.
    let mut line = |content: &str| writeln!(text, "{}", clean(content)).unwrap_or_default();
    line(&format!("exact mode: every object of {}", account.command.join(" ")));
    for problem in &account.unreadable {
        line(&format!("not counted: {problem}"));
    }
    account.left_out().iter().for_each(|said| line(said));
    if account.processes.is_empty() {
        line("no .NET runtime loaded the profiler: nothing was counted");
    }
    for process in &account.processes {
        line("");
        for content in of_process(process, options) {
            line(&content);
        }
    }
    text
}

/// What a person is told right after the recording, and the profile's comments say: one line a
/// process.
#[must_use]
pub fn lines(account: &ExactAccount) -> Vec<String> {
    let problems = account.unreadable.iter().cloned().chain(account.left_out());
    let mut lines: Vec<String> =
        problems.map(|why| format!("{EXACT_PREFIX}{LOST_PREFIX}{why}")).collect();
    if account.processes.is_empty() {
        lines.push(
            "exact: no .NET runtime loaded the profiler: no .NET program, or one with \
             DOTNET_EnableDiagnostics(_Profiler)=0"
                .to_owned(),
        );
    }
    lines.extend(account.processes.iter().map(|process| {
        format!(
            "{EXACT_PREFIX}{}, .NET {}: {}, {}, {}, {}; {}; {}",
            who(process),
            process.runtime,
            counted(process.objects, "object"),
            bytes(process.bytes),
            counted(process.types.len(), "type"),
            counted(process.collections.len(), "collection"),
            lost(process),
            slowdown(process)
        )
    }));
    lines
}

fn who(process: &ExactProcess) -> String {
    match process.name.as_str() {
        "" => format!("pid {}", process.pid),
        name => format!("pid {} ({})", process.pid, clean(name)),
    }
}

/// One line: whether everything was counted.
fn lost(process: &ExactProcess) -> String {
    let mut all: Vec<String> = process
        .losses
        .iter()
        .map(|(name, number)| {
            let known = LOSSES.iter().map(|(_, name, meaning)| (*name, *meaning)).chain([TORN]);
            let meaning =
                known.into_iter().find(|(known, _)| known == name).map_or("", |(_, text)| text);
            format!("{} {name} ({meaning})", count(*number))
        })
        .collect();
    if process.ending == Ending::Killed {
        all.push(
            "what it allocated in its last moments, a second at most: it was killed or crashed"
                .to_owned(),
        );
    }
    if process.ending == Ending::Declined {
        let why = process.why.iter().map(|why| format!(", because of {why}"));
        all.push(format!("all of it{}", why.collect::<String>()));
    }
    if process.untold {
        all.push(UNTOLD.to_owned());
    }
    if all.is_empty() {
        "nothing was lost".to_owned()
    } else {
        format!("{LOST_PREFIX}{}", all.join("; "))
    }
}

/// One line: what exact mode cost, and which part of that is measured. Its work in collections is;
/// what a single object costs is not: most of it is the runtime's, which makes objects in another
/// way for whoever wants to know of each, and to read a clock twice costs more than our part.
fn slowdown(process: &ExactProcess) -> String {
    let object_ns = object_ns(&process.runtime);
    let told = process.objects.saturating_sub(process.unseen);
    let objects_ns = object_ns.map(|ns| told as f64 * ns);
    let [least, most] = object_ns;
    let each = format!("estimated from {least} to {most} ns each (docs/exact-mode.md)");
    let own_ns = process.own_cpu_ns.unwrap_or(process.own_ns);
    let own = format!("{} in collections, measured", time(own_ns));
    let between = |[low, high]: [f64; 2]| {
        format!("{} to {}", time(low.round() as u64), time(high.round() as u64))
    };
    let Some(cpu_ns) = process.cpu_ns.filter(|ns| *ns > 0) else {
        return format!(
            "{own}, and some {} for objects, {each}; the CPU time of this process alone is not \
             known",
            between(objects_ns)
        );
    };
    let all_ns = cpu_ns as f64;
    let times = objects_ns.map(|objects_ns| {
        let least_ns = (process.objects as f64 * PLAIN_NS).max(all_ns * 0.01);
        (all_ns / (all_ns - objects_ns - own_ns as f64).max(least_ns)).max(1.0)
    });
    let [low, high] = times.map(|times| format!("{times:.1}"));
    let times = if low == high { low } else { format!("{low} to {high}") };
    format!(
        "some {times} times the CPU time of an ordinary run: of {} some {} for objects, {each}, \
         and {own}; where much survives, more: the runtime's own collections take longer, too",
        time(cpu_ns),
        between(objects_ns.map(|ns| ns.min(all_ns)))
    )
}

fn of_process(process: &ExactProcess, options: SummaryOptions) -> Vec<String> {
    let mut lines = vec![format!(
        "{}, .NET {}, {}",
        who(process),
        process.runtime,
        match process.ending {
            Ending::Ended =>
                format!("from its first instruction to its end, {}", time(process.counted_ns)),
            Ending::Running => format!("its first {}; it went on", time(process.counted_ns)),
            Ending::Killed => format!(
                "its first {}; it was killed or crashed: what it allocated after that, within a \
                 second, is missing",
                time(process.counted_ns)
            ),
            Ending::Declined => format!(
                "which was not counted: {}",
                process
                    .why
                    .as_deref()
                    .unwrap_or("its table was not opened within a second, or its runtime refused")
            ),
        }
    )];
    let left = process.types.iter().fold(ExactCount::default(), |mut sum, of| {
        sum.add(of.left);
        sum
    });
    lines.push(format!(
        "  allocated  {}, {}",
        counted(process.objects, "object"),
        bytes(process.bytes)
    ));
    if process.unseen > 0 {
        lines.push(format!(
            "  found      {} of them, which .NET tells no profiler of (boxed values, most of \
             them): by a collection, at which they count as born, or at the end",
            count(process.unseen)
        ));
    }
    lines.push(format!(
        "  left       {}: alive, or not looked at by a collection since",
        both(left)
    ));
    lines.push(format!("  whole      {}", lost(process)));
    lines.push(format!("  slowdown   {}; no collection ran in the background", slowdown(process)));
    lines.push(String::new());
    lines.extend(collections(&process.collections, process.counted_ns, options.rows));
    lines.push(String::new());
    lines.extend(lives(&process.types));
    lines.push(String::new());
    lines.extend(types(&process.types, options));
    lines.push(String::new());
    lines.extend(holders(process, options));
    lines
}

fn pause_ns(of: &ExactCollection) -> u64 {
    of.pause_ns.unwrap_or(of.took_ns)
}

fn collections(all: &[ExactCollection], counted_ns: u64, rows: usize) -> Vec<String> {
    if all.is_empty() {
        return vec!["collections: none".to_owned()];
    }
    let total = all.iter().map(pause_ns).fold(0, u64::saturating_add);
    let unknown = match all.iter().filter(|of| of.pause_ns.is_none()).count() {
        0 => String::new(),
        unknown => {
            format!("; of {unknown} the pause is not known, and the collection itself counts alone")
        }
    };
    let mut lines = vec![format!(
        "collections: {}, pauses of {} in all ({} of the time), exact mode's own work taken \
         away{unknown}",
        all.len(),
        time(total),
        share(total, counted_ns)
    )];
    lines.push(format!(
        "  {:<34} {:>6} {:>10} {:>10}  {:>12} {:>12} {:>12}",
        "generation, reason", "count", "pauses", "longest", "survived", "dead", "moved"
    ));
    let mut groups: BTreeMap<(u8, &str), Vec<&ExactCollection>> = BTreeMap::new();
    for of in all {
        groups.entry((of.generation, &of.reason)).or_default().push(of);
    }
    for ((generation, reason), of) in groups {
        let sum = |what: fn(&ExactCollection) -> u64| {
            of.iter().map(|one| what(one)).fold(0, u64::saturating_add)
        };
        lines.push(format!(
            "  {:<34} {:>6} {:>10} {:>10}  {:>12} {:>12} {:>12}",
            format!("{generation}, {reason}"),
            of.len(),
            time(sum(pause_ns)),
            time(of.iter().map(|one| pause_ns(one)).max().unwrap_or(0)),
            bytes(sum(|one| one.survived.bytes)),
            bytes(sum(|one| one.dead.bytes)),
            bytes(sum(|one| one.moved.bytes)),
        ));
    }
    let mut longest: Vec<&ExactCollection> = all.iter().collect();
    longest.sort_by_key(|of| std::cmp::Reverse(pause_ns(of)));
    longest.truncate(rows);
    longest.sort_by_key(|of| of.index);
    lines.push(String::new());
    lines.push(match all.len() > longest.len() {
        true => format!("the {} longest (all are in the JSON file)", longest.len()),
        false => "each of them".to_owned(),
    });
    lines.push(format!(
        "  {:>6} {:>10} {:>3} {:<26} {:>10}  {:>12} {:>12} {:>12} {:>12}  {:>11} {:>6} {:>10} \
         {:>6}",
        "number",
        "at",
        "gen",
        "reason",
        "pause",
        "new objects",
        "survived",
        "to gen 1",
        "to gen 2",
        "heap before",
        "free",
        "heap after",
        "free"
    ));
    for of in longest {
        lines.push(format!(
            "  {:>6} {:>10} {:>3} {:<26} {:>10}  {:>12} {:>12} {:>12} {:>12}  {:>11} {:>6} {:>10} \
             {:>6}",
            of.index.saturating_add(1),
            time(of.began_ns),
            of.generation,
            fit(&of.reason, "", Some(26)).0,
            time(pause_ns(of)),
            count(of.allocated.objects),
            count(of.survived.objects),
            count(of.promoted_to_1),
            count(of.promoted_to_2),
            bytes(of.heap_before),
            share(of.heap_before.saturating_sub(of.objects_before), of.heap_before),
            bytes(of.heap_after),
            share(of.heap_after.saturating_sub(of.objects_after), of.heap_after),
        ));
    }
    lines
}

/// The lifetimes of objects, all types together.
fn lives(types: &[ExactType]) -> Vec<String> {
    let table = |unit: &str, of: fn(&ExactType) -> &Vec<Lifetime>| {
        let mut sums: BTreeMap<u32, (Option<u32>, u64)> = BTreeMap::new();
        for lifetime in types.iter().flat_map(of) {
            let sum = sums.entry(lifetime.from).or_insert((lifetime.to, 0));
            sum.1 = sum.1.saturating_add(lifetime.objects);
        }
        let all = sums.values().fold(0, |sum: u64, (_, objects)| sum.saturating_add(*objects));
        let mut lines = Vec::new();
        for (from, (to, objects)) in sums {
            let span = match to {
                Some(to) if to == from => from.to_string(),
                Some(to) => format!("{from} to {to}"),
                None => format!("{from} or more"),
            };
            lines.push(format!(
                "  {span:>18} {unit:<12} {:>14} {:>7}",
                count(objects),
                share(objects, all)
            ));
        }
        lines
    };
    let mut lines = vec!["lifetimes of the dead".to_owned()];
    lines.extend(table("collections", |of| &of.died_after_collections));
    lines.extend(table("ms", |of| &of.died_after_ms));
    lines
}

fn types(types: &[ExactType], options: SummaryOptions) -> Vec<String> {
    let shown = types.len().min(options.rows);
    let mut lines = vec![
        format!("types: {shown} of {}, most bytes first", types.len()),
        format!(
            "  {:>14} {:>10} {:>12} {:>10} {:>12} {:>10} {:>10} {:>12} {:>9}  type",
            "objects",
            "bytes",
            "survivors",
            "moves",
            "to gen 1",
            "to gen 2",
            "finalized",
            "left",
            "left"
        ),
    ];
    for of in types.iter().take(shown) {
        let numbers = format!(
            "  {:>14} {:>10} {:>12} {:>10} {:>12} {:>10} {:>10} {:>12} {:>9}  ",
            count(of.allocated.objects),
            bytes(of.allocated.bytes),
            count(of.survivors.objects),
            count(of.moves.objects),
            count(of.promoted_to_1),
            count(of.promoted_to_2),
            match of.resurrected {
                0 => count(of.finalizable),
                resurrected => format!("{} +{}", count(of.finalizable), count(resurrected)),
            },
            count(of.left.objects),
            bytes(of.left.bytes),
        );
        let room = options.width.map(|width| width.saturating_sub(numbers.chars().count()));
        let (name, module) = fit(&of.name, &of.module, room);
        lines.push(format!("{numbers}{name}{}{module}", if module.is_empty() { "" } else { "  " }));
    }
    lines.push(
        "survivors: objects that survived a collection; finalized: queued for the finalizer, +n: \
         and alive after that"
            .to_owned(),
    );
    lines
}

/// What held the objects of each type when somebody looked.
fn holders(process: &ExactProcess, options: SummaryOptions) -> Vec<String> {
    let Some(look) = process.looked else {
        return vec!["who holds them: not known, there was no full collection".to_owned()];
    };
    let mut types: Vec<&ExactType> =
        process.types.iter().filter(|of| of.holders.alive > 0).collect();
    types.sort_by_key(|of| std::cmp::Reverse(of.holders.alive));
    let shown = types.len().min(options.rows);
    let mut lines = vec![
        format!(
            "who holds them, after collection {} ({} to look): {shown} of {} types, most living \
             objects first",
            look.collection.saturating_add(1),
            time(look.took_ns),
            types.len()
        ),
        format!(
            "  {:>14} {:>14} {:>14} {:>8} {:>8} {:>10} {:>8}  type",
            "alive", "referred to by", "they refer to", "stacks", "handles", "finalizers", "others"
        ),
    ];
    for of in types.into_iter().take(shown) {
        let held = of.holders;
        let numbers = format!(
            "  {:>14} {:>14} {:>14} {:>8} {:>8} {:>10} {:>8}  ",
            count(held.alive),
            count(held.referenced),
            count(held.references),
            count(held.stack_roots),
            count(held.handle_roots),
            count(held.finalizer_roots),
            count(held.other_roots),
        );
        let room = options.width.map(|width| width.saturating_sub(numbers.chars().count()));
        let (name, module) = fit(&of.name, &of.module, room);
        lines.push(format!("{numbers}{name}{}{module}", if module.is_empty() { "" } else { "  " }));
    }
    lines.push(
        "static fields are elements of arrays of the runtime's (object[]), which handles hold; \
         weak handles hold nothing"
            .to_owned(),
    );
    lines
}

#[cfg(test)]
mod tests {
    use super::{SummaryOptions, lines, text};
    use perfusion_dotnet::exact::{
        Ending, ExactAccount, ExactCollection, ExactCount, ExactHolders, ExactProcess, ExactType,
        HolderScanSummary, Lifetime,
    };

    fn account() -> ExactAccount {
        let of = ExactType {
            name: "Shop.Order".to_owned(),
            module: "shop.dll".to_owned(),
            allocated: ExactCount { objects: 1_000_000, bytes: 24_000_000 },
            left: ExactCount { objects: 12, bytes: 288 },
            finalizable: 7,
            resurrected: 2,
            holders: ExactHolders {
                alive: 9,
                referenced: 1234,
                handle_roots: 3,
                ..ExactHolders::default()
            },
            died_after_collections: vec![Lifetime { from: 2, to: Some(3), objects: 5 }],
            ..ExactType::default()
        };
        let collection = ExactCollection {
            generation: 2,
            reason: "induced".to_owned(),
            ..ExactCollection::default()
        };
        let process = ExactProcess {
            pid: 42,
            runtime: "10.0.1".to_owned(),
            objects: 1_000_000,
            bytes: 24_000_000,
            types: vec![of],
            collections: vec![collection],
            looked: Some(HolderScanSummary { collection: 0, took_ns: 2_000_000 }),
            ..ExactProcess::default()
        };
        ExactAccount {
            command: vec!["shop".to_owned()],
            processes: vec![process],
            ..ExactAccount::default()
        }
    }

    #[test]
    fn a_person_reads_what_was_counted_and_whether_that_is_all() {
        let text = text(&account(), SummaryOptions { rows: 5, width: None });
        for part in [
            "every object of shop",
            "1,000,000 objects, 22.9 MiB",
            "nothing was lost",
            "2, induced",
            "2 to 3 collections",
            "7 +2",
            "Shop.Order  shop.dll",
            "after collection 1 (2 ms to look): 1 of 1 types",
            "9          1,234              0        0        3 ",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }

    #[test]
    fn what_of_the_slowdown_is_measured_and_what_estimated_is_said() {
        let mut account = account();
        let said = |account: &ExactAccount| lines(account).join("\n");
        let unknown = said(&account);
        assert!(
            unknown.contains("; 0 in collections, measured, and some 50 ms to 100 ms for objects"),
            "{unknown}"
        );
        let process = &mut account.processes[0];
        (process.cpu_ns, process.own_ns) = (Some(300_000_000), 50_000_000);
        // 300 ms, of which 50 and 50 are ours.
        let known = said(&account);
        assert!(
            known.contains(
                "some 1.5 to 2.0 times the CPU time of an ordinary run: of 300 ms some 50 ms to \
                 100 ms for objects, estimated from 50 to 100 ns each \
                 (docs/exact-mode.md), and 50 ms in collections, measured; where much survives, \
                 more"
            ),
            "{known}"
        );
        account.processes[0].runtime = "8.0.32".to_owned();
        assert!(
            said(&account)
                .contains("some 44 ms to 80 ms for objects, estimated from 44 to 80 ns each")
        );
    }

    #[test]
    fn losses_and_a_violent_end_are_told() {
        let mut account = account();
        account.processes[0].losses.insert("memory".to_owned(), 3);
        account.processes[0].ending = Ending::Killed;
        let text = text(&account, SummaryOptions { rows: 5, width: Some(80) });
        assert!(
            text.contains("LOST: 3 memory (objects not counted")
                && text.contains("killed or crashed"),
            "{text}"
        );
        account.processes[0].losses.clear();
        let killed = lines(&account);
        assert!(
            killed[0].contains("; LOST: what it allocated in its last moments")
                && !killed[0].contains("nothing was lost"),
            "{killed:?}"
        );
        let none = lines(&ExactAccount::default());
        assert!(none[0].contains("no .NET runtime"), "{none:?}");
    }
}
