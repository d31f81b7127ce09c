//! Show 4: how much time each thread had, waited for a CPU and was blocked: exact, whatever the
//! sampling rate.

use std::fs;
use std::time::{Duration, Instant};

use system_tests::app::Compiler;
use system_tests::environment::{Need, RECORD, RECORD_NET9, begin};
use system_tests::perfusion::record_pid;
use system_tests::schedstat::{self, schedstat};
use system_tests::{Profile, Runtime, Workload};

struct Times {
    oncpu: i64,
    runnable: i64,
    blocked: i64,
    wall: i64,
}

fn times(profile: &Profile, tid: u32) -> Times {
    let tid = tid.to_string();
    let sum = |column| profile.sum(column, |sample| sample.label("thread_id") == tid);
    Times {
        oncpu: sum("cpu"),
        runnable: sum("runnable"),
        blocked: sum("blocked"),
        wall: sum("wall"),
    }
}

#[test]
fn duty_cycles_and_the_sum_of_states_and_schedstat_agree() {
    let Some(_turn) = begin("threads::duty_cycles", RECORD_NET9) else { return };
    let app = Workload::dotnet(Runtime::Net9, "dutycycle", &[]).unwrap().start().unwrap();
    // The promise is stated over 10 s.
    let length = Duration::from_secs(10);
    let log = schedstat::Log::start(app.pid());
    let begun = Instant::now();
    let (profile, outcome) = record_pid(app.pid(), length, &[]).unwrap();
    let took = begun.elapsed();
    let log = log.stop();
    let threads: Vec<(i64, u32)> =
        [20, 50, 90].map(|percent| (percent, app.thread(&format!("duty-{percent}")))).to_vec();
    let truth = app.stop().unwrap();
    let duration = profile.duration_ns as f64;
    // Started and written around the recording; the profile says how long it was itself, on a busy
    // machine longer than it was to be.
    let length = 9.5..took.as_secs_f64();
    assert!(
        length.contains(&(duration / 1e9)),
        "{duration} ns, {took:?} in all:\n{}",
        outcome.stderr
    );

    for (percent, tid) in threads {
        let Times { oncpu, runnable, blocked, wall } = times(&profile, tid);
        let share = oncpu as f64 / duration;
        let own = truth[format!("cpu_ns_{percent}")].as_f64().unwrap()
            / truth[format!("wall_ns_{percent}")].as_f64().unwrap();
        let picture = format!(
            "duty-{percent}: on-CPU {oncpu} + runnable {runnable} + blocked {blocked} ns, wall \
             {wall}, recording {duration} ns; by its own clocks {own:.4}"
        );
        // 3 points, as promised. On a machine with too few CPUs a thread cannot have its duty, nor
        // the same one in each second (its own figure covers some seconds more than the recording):
        // then schedstat below is the judge alone.
        if (own - percent as f64 / 100.0).abs() < 0.01 {
            assert!((share - own).abs() < 0.03, "{picture}");
            assert!((share - percent as f64 / 100.0).abs() < 0.03, "{picture}");
        } else {
            eprintln!("the machine is too busy for a duty of {percent} %: {picture}");
        }
        // The law of D2.
        let sum = (oncpu + runnable + blocked) as f64;
        assert!((sum - duration).abs() <= duration * 0.01, "{picture}");
        assert!(
            (wall as f64 - sum).abs() <= sum * 0.001,
            "the wall column is the sum of the three: {picture}"
        );
        // 1 % as promised, beyond what the looks around the two ends leave open; schedstat itself
        // moves on only with the scheduler's tick, of at most 10 ms.
        let between =
            log.oncpu_between(tid, profile.time_ns, profile.time_ns + profile.duration_ns);
        let (least, most) = between.expect("looks before and after the recording");
        let (least, most) = (least as f64, most as f64);
        assert!(
            oncpu as f64 >= least * 0.99 - 10e6 && oncpu as f64 <= most * 1.01 + 10e6,
            "schedstat says {least} to {most}: {picture}"
        );
    }
}

#[test]
fn a_thread_that_wakes_thousands_of_times_a_second_has_the_cpu_time_that_the_kernel_says() {
    let Some(_turn) = begin("threads::naps", &[RECORD, &[Need::C]].concat()) else { return };
    let app = Workload::compiled(Compiler::C, "naps.c", &["-O2"]).unwrap().start().unwrap();
    let napper = app.thread("napper");
    let log = schedstat::Log::start(app.pid());
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(4), &[]).unwrap();
    let log = log.stop();
    let Times { oncpu, runnable, blocked, .. } = times(&profile, napper);
    let (from, to) = (profile.time_ns, profile.time_ns + profile.duration_ns);
    let (least, most) =
        log.oncpu_between(napper, from, to).expect("looks before and after the recording");
    // 3 points beyond what the looks leave open: schedstat itself moves on with the scheduler's
    // tick only.
    let (least, most) = (least as f64 * 0.97 - 10e6, most as f64 * 1.03 + 10e6);
    assert!(
        (least..most).contains(&(oncpu as f64)),
        "on-CPU {oncpu}, by schedstat {least} to {most}; runnable {runnable}, blocked {blocked}"
    );
    let sum = oncpu + runnable + blocked;
    assert!(
        (sum - profile.duration_ns).abs() * 100 <= profile.duration_ns,
        "{sum} of {}",
        profile.duration_ns
    );
    app.stop().unwrap();
}

#[test]
fn every_thread_of_the_process_adds_up_to_its_time() {
    let Some(_turn) = begin("threads::every_thread_adds_up", RECORD_NET9) else { return };
    let app = Workload::dotnet(Runtime::Net9, "waits", &[]).unwrap().start().unwrap();
    let before: Vec<u32> = schedstat(app.pid()).into_keys().collect();
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(4), &[]).unwrap();
    let after = schedstat(app.pid());
    // Threads that were there all the time, asleep or not: a sleeper that never switched is found
    // only by looking.
    let all: Vec<u32> = before.into_iter().filter(|tid| after.contains_key(tid)).collect();
    assert!(all.len() > 8, "{all:?}");
    for tid in all {
        let Times { oncpu, runnable, blocked, wall } = times(&profile, tid);
        let sum = oncpu + runnable + blocked;
        let name =
            fs::read_to_string(format!("/proc/{}/task/{tid}/comm", app.pid())).unwrap_or_default();
        assert!(
            (sum - profile.duration_ns).abs() * 100 <= profile.duration_ns,
            "{} {tid}: {oncpu} + {runnable} + {blocked} = {sum} (wall {wall}), recording {} ns",
            name.trim(),
            profile.duration_ns
        );
    }
    app.stop().unwrap();
}
