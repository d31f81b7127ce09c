//! The short form of `cargo xtask truth`: stacks of programs with known call chains, attached and
//! from the program's start.

use std::time::Duration;

use system_tests::environment::{Need, RECORD, Runtime, begin, begin_beside, long_form};
use system_tests::truth::measure::{Measured, Mode, Options, attached, launched};
use system_tests::truth::published::{self, Way};
use system_tests::truth::{cases, downsampling, report};

/// The workloads: unwind tables without frame pointers, landing pads, funclets, tail calls,
/// precompiled code inside a program; waits of known length.
const SHORT: [&str; 6] = [
    "c-O2-nofp",
    "exceptions-9",
    "tailcalls-10",
    "single-file-readytorun-10",
    "compressed-readytorun-10",
    "truthwaits-10",
];

#[test]
fn known_call_chains_are_exact_attached_and_from_the_start() {
    let options = Options { length: Duration::from_secs(2), frequency_hz: 1999 };
    for case in cases::all().into_iter().filter(|case| SHORT.contains(&case.name.as_str())) {
        let needs = [RECORD, &[case.need()]].concat();
        let Some(_turn) = begin(&format!("truth::known_call_chains of {}", case.name), &needs)
        else {
            continue;
        };
        let workload = case.build().unwrap();
        check(&case.name, &attached(&workload, options).unwrap());
        check(&case.name, &launched(&workload, options).unwrap());
    }
}

#[test]
fn downsampled_waits_are_unbiased_within_the_stated_error() {
    let Some(_turn) = begin("truth::downsampled_waits", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let (repetitions, length) =
        if long_form() { (100, Duration::from_secs(3)) } else { (8, Duration::from_millis(1500)) };
    let results = downsampling::repeat(repetitions, length).unwrap();
    // A mean further off than 5 of its standard errors, as every nap's own length gives them, is no
    // chance.
    let (mean, stderr) = downsampling::mean_error(&results);
    assert!(mean.abs() <= 5.0 * stderr, "mean error {mean} ± {stderr}: {results:#?}");
    // As promised: 97 of 100, where no naps were much longer than the rest; a busy machine makes
    // them so. Of 8, fewer than 6 have a chance of 1 in 3000 even if the promise is only just kept.
    let even: Vec<_> = results.iter().copied().filter(|repetition| repetition.is_even()).collect();
    let missed = even.len() - downsampling::covered(&even);
    assert!(
        missed <= if long_form() { 3 } else { 2 },
        "{missed} of {} missed: {results:#?}",
        even.len()
    );
}

fn check(name: &str, measured: &Measured) {
    let picture = format!("{name}, {}\n{}", measured.mode.name(), report::picture(measured));
    let cpu = &measured.on_cpu;
    // A thirtieth of 2 s at 1999 Hz, for a machine that gives the program that much of a CPU; a
    // program that waits has few samples to judge.
    let waits_only = name.starts_with("truthwaits");
    assert!(waits_only || cpu.total >= 120.0, "only {} samples: {picture}", cpu.total);
    // The promise is 1 in 1000; of so few samples one or two more prove nothing. Dynamic methods
    // that were collected before the runtime could be asked without danger have no name
    // (docs/limits.md): those seen before the attach, and in each batch's last moments.
    let nameless = if name.starts_with("dynamicmethods") { cpu.total / 50.0 } else { 0.0 };
    let few = if waits_only { cpu.total / 20.0 } else { (cpu.total / 1000.0).max(2.0) };
    assert!(cpu.total - cpu.exact <= few + nameless, "{picture}");
    assert!(cpu.total - cpu.complete <= few, "{picture}");
    // Waits weigh by time: of seconds of them 1 % may be wrong, or as much as single waits take on
    // a busy machine. A stack that is wrong each time weighs far more.
    let waits = &measured.off_cpu;
    let few = (waits.total / 100.0).max(100e6);
    // The profile says itself that it has no stack of these; from a program's start none can be
    // older than the recording.
    let of = |marker: &str| -> f64 {
        waits.wrong.iter().filter(|(stack, _)| stack.starts_with(marker)).map(|(_, ns)| ns).sum()
    };
    let (older, lost) = (of("[waiting since before"), of("[stack lost]"));
    assert!(older <= 0.0 || measured.mode == Mode::Attached, "{older} ns: {picture}");
    assert!(lost <= few, "{lost} ns of waits lost: {picture}");
    let wrong = waits.total - waits.exact - older - lost;
    assert!(wrong <= few, "{wrong} ns of waits have wrong stacks: {picture}");
    // A frame without a name is in no chain; while a program starts stubs of the runtime can be
    // gone before their name is asked for.
    let few = if measured.mode == Mode::Launched { waits.frames / 1000.0 } else { 0.0 };
    assert!(nameless > 0.0 || waits.wrong_frames <= few, "wrong frames in waits: {picture}");
    // 1 % as promised, and 30 ms of 3 s for the recording's two ends, which a busy machine moves
    // apart.
    for error in [measured.wall_error, measured.cpu_error].into_iter().flatten() {
        assert!(
            error <= 0.02,
            "wall off by {:?}, cpu by {:?}: {picture}",
            measured.wall_error,
            measured.cpu_error
        );
    }
    // 2 % as promised; the program reads its clock before and after it waits, and on a busy machine
    // may lose its CPU in between.
    assert!(
        measured.wait_error.is_none_or(|error| error <= 0.05),
        "{:?}: {picture}",
        measured.wait_error
    );
}

/// The long form has all ways; `native_symbols` has NativeAOT in each run.
#[test]
fn a_program_is_seen_alike_however_it_was_published() {
    const SHORT: [Way; 3] = [Way::Installed(Runtime::Net11), Way::Single, Way::Trimmed];
    let ways = if long_form() { &Way::ALL[..] } else { &SHORT };
    let seconds = if long_form() { 20 } else { 8 };
    for way in ways {
        let needs = [RECORD, &way.needs()].concat();
        let name = format!("truth::a_program_is_seen_alike: {}", way.name());
        let Some(_turn) = begin_beside(&name, &needs) else { continue };
        let measured = published::measure(*way, seconds, 499).unwrap();
        let broken = measured.broken_promises();
        assert!(broken.is_empty(), "{}: {broken:?}\n{}", way.name(), measured.picture);
    }
}
