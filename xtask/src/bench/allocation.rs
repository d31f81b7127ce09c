//! What a sample of an allocation costs the app.

use std::process::Command;

use anyhow::Result;

use super::{Bench, FigureRow, comment, load};
use crate::exec::output;

/// CPU time below the shim's event callback, by the number of allocation samples it took: all of
/// them with their stacks, so that chance, which is cheaper, decides on none.
pub(super) fn allocation(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    const CALLBACK: &str = "event_pipe_event_delivered";
    let mut all = Vec::new();
    for runtime in ["8", "9", "10"] {
        let app = load::App::start_allocating(bench.paths, runtime)?;
        load::pass(2.0); // tiered compilation settles
        let perfusion = bench.paths.perfusion();
        let profile = bench.paths.target.join("bench/allocation.pb.gz");
        output(
            Command::new(&perfusion)
                .args([
                    "record",
                    "--frequency",
                    "4999",
                    "--duration",
                    "8s",
                    "--allocation-samples",
                    "1000000",
                ])
                .args(["--pid", &app.pid().to_string(), "--output"])
                .arg(&profile),
        )?;
        let folded = output(
            Command::new(&perfusion)
                .arg("report")
                .arg(&profile)
                .args(["--format", "folded", "--type", "cpu"]),
        )?;
        let inside = folded.lines().filter(|line| line.contains(CALLBACK));
        let ns: f64 = inside.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum();
        let samples = comment(&profile, "shim_allocation_samples")?;
        all.push(format!(".NET {runtime}: {:.2} µs, mean of {samples}", ns / samples / 1e3));
        app.end()?;
    }
    Ok(vec![FigureRow {
        what: "one allocation sample in the app, stack copied",
        measured: all.join("; "),
        budget: "5 µs",
    }])
}
