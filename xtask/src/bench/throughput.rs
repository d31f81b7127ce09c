//! What an app loses of its operations per second while it is recorded.

use anyhow::Result;

use super::{Bench, FigureRow, daemon, listening, load, median::median_interval, web};

/// The app that works and switches.
pub(super) fn throughput(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    throughput_with(bench, "9", &[])
}

/// The app that does nothing but allocate.
pub(super) fn micro(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    throughput_with(bench, "9", &["micro"])
}

/// The same where the runtime itself samples allocations.
pub(super) fn micro_sampled(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    throughput_with(bench, "10", &["micro"])
}

fn throughput_with(bench: &Bench<'_>, runtime: &str, arguments: &[&str]) -> Result<Vec<FigureRow>> {
    let listener = listening::Listener::new(bench.paths)?;
    let mut app = load::App::start_with_listener(bench.paths, runtime, arguments, &listener)?;
    throughput_of(bench, &mut app, listener)
}

/// The Kestrel app, and clients that keep all CPUs busy with requests that take it half a
/// millisecond each.
pub(super) fn kestrel(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    kestrel_of(bench, 500)
}

/// The same with as many requests as it can answer.
pub(super) fn small_requests(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    kestrel_of(bench, 10)
}

fn kestrel_of(bench: &Bench<'_>, orders: u32) -> Result<Vec<FigureRow>> {
    let listener = listening::Listener::new(bench.paths)?;
    let (mut app, clients) = web::start(bench.paths, orders, &listener)?;
    let rows = throughput_of(bench, &mut app, listener)?;
    clients.end()?;
    app.end()?;
    Ok(rows)
}

/// What happens to the app in a window.
#[derive(Clone, Copy)]
enum BenchWindow {
    Plain,
    Listening,
    Recorded,
}

/// Rounds of windows, every second one backwards, so that drift cancels out; the interval is of the
/// rounds' ratios. A recorded window begins once the shim is there and the probes have learned the
/// app's code: the start is a figure of its own, and the daemon is busy with what is new for some
/// five seconds.
fn throughput_of(
    bench: &Bench<'_>,
    app: &mut load::App,
    mut listener: listening::Listener,
) -> Result<Vec<FigureRow>> {
    const ROUNDS: usize = 20;
    const SETTLING_SECONDS: f64 = 2.0;
    const NEWS_SECONDS: f64 = 6.0;
    const WINDOW_SECONDS: f64 = 4.0;
    load::pass(NEWS_SECONDS); // tiered compilation settles
    let mut ratios: [Vec<f64>; 4] = Default::default();
    let mut daemons = Vec::new();
    for round in 0..ROUNDS {
        let mut windows = [BenchWindow::Plain, BenchWindow::Listening, BenchWindow::Recorded];
        if round % 2 == 1 {
            windows.reverse();
        }
        let mut rates = [[0.0; 2]; 3];
        for window in windows {
            let of_window = &mut rates[window as usize];
            match window {
                BenchWindow::Plain => {
                    load::pass(SETTLING_SECONDS);
                    *of_window = app.rates(WINDOW_SECONDS)?;
                }
                BenchWindow::Listening => {
                    listener.listen(true)?;
                    load::pass(SETTLING_SECONDS);
                    *of_window = app.rates(WINDOW_SECONDS)?;
                    listener.listen(false)?;
                }
                BenchWindow::Recorded => {
                    let mut daemon = daemon::Recorder::start(bench.paths, app.pid())?;
                    daemon.first_sample()?;
                    daemon.attached(app.pid())?;
                    load::pass(NEWS_SECONDS);
                    let before = daemon.cpu_seconds()?;
                    *of_window = app.rates(WINDOW_SECONDS)?;
                    daemons.push((daemon.cpu_seconds()? - before) / WINDOW_SECONDS * 100.0);
                    daemon.finish()?;
                }
            }
        }
        let [[plain, plain_cpu], [_, listening_cpu], [recorded, recorded_cpu]] = rates;
        let of_round = [
            recorded / plain,
            recorded_cpu / plain_cpu,
            listening_cpu / plain_cpu,
            recorded_cpu / listening_cpu,
        ];
        for (ratios, ratio) in ratios.iter_mut().zip(of_round) {
            ratios.push(ratio * 100.0);
        }
        bench.steps.step(&format!("round {} of {ROUNDS}", round + 1));
    }
    let row = |what, budget, ratios: &[f64]| {
        let [median, low, high] = median_interval(ratios);
        let lowest = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let highest = ratios.iter().copied().fold(0.0, f64::max);
        FigureRow {
            what,
            measured: format!(
                "{median:.2} % (95 % interval {low:.2} to {high:.2}), median of {} from \
                 {lowest:.2} to {highest:.2}",
                ratios.len()
            ),
            budget,
        }
    };
    let [of_time, of_cpu, listening, of_listening] = &ratios;
    Ok(vec![
        row("operations per second with everything on, of without", "99 %", of_time),
        row("the same per second of CPU time the app got", "99 %", of_cpu),
        row(
            "of that what the runtime keeps when it tells its events to nobody \
             (`xtask/native/listening.c`)",
            "",
            listening,
        ),
        row("what is left to shim, probes and cold caches: recorded, of that", "", of_listening),
        daemon_row(&daemons),
    ])
}

fn daemon_row(percents: &[f64]) -> FigureRow {
    let [median, low, high] = median_interval(percents);
    FigureRow {
        what: "CPU of the daemon meanwhile, of one CPU",
        measured: format!("{median:.1} % (95 % interval {low:.1} to {high:.1})"),
        budget: "1 % of the node",
    }
}
