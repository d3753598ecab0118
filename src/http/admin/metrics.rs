//! Counters and sizes in the OpenMetrics text format.

use std::fmt::Write as _;

use crate::stats::Stats;

/// All that [`Stats`] tells, as a scraper reads it.
pub(super) fn text(stats: &Stats) -> String {
    let mut text =
        String::from("# TYPE keyonce_answers counter\n# HELP keyonce_answers What reserves were answered.\n");
    let answers = [
        ("fresh", stats.fresh),
        ("replay", stats.replays),
        ("in_flight", stats.in_flight),
        ("interrupted", stats.interrupted),
        ("mismatch", stats.mismatches),
        ("too_old", stats.too_old),
    ];
    for (answer, count) in answers {
        line(&mut text, &format!("keyonce_answers_total{{answer=\"{answer}\"}} {count}"));
    }
    let counters = [
        ("completed", "Responses that were stored.", stats.completed),
        ("released", "Reservations that were given back.", stats.released),
        ("superseded", "Acts of owners that were no longer the latest.", stats.superseded),
        ("fresh_key_per_retry", "Requests that came again under another key, as sampled.", stats.fresh_key_per_retry),
        ("expired_unresolved", "Interrupted keys that expired before anybody settled them.", stats.expired_unresolved),
        ("syncs", "Data syncs of the log.", stats.syncs),
    ];
    for (name, help, count) in counters {
        head(&mut text, name, "counter", help);
        line(&mut text, &format!("keyonce_{name}_total {count}"));
    }
    let gauges = [
        ("guards", "Reservations whose guard lives.", stats.guards),
        ("waiting", "Callers that wait for a key in flight.", stats.waiting),
        ("keys", "Entries of the index.", stats.keys),
        ("index_bytes", "Memory of the index.", stats.index_bytes),
        ("segments", "Live segments of the log.", stats.segments),
        ("log_bytes", "Bytes of the live segments.", stats.log_bytes),
        ("clock_jump_held_milliseconds", "How far the wall clock has jumped.", stats.clock_jump_held_ms),
    ];
    for (name, help, value) in gauges {
        head(&mut text, name, "gauge", help);
        line(&mut text, &format!("keyonce_{name} {value}"));
    }
    retry_ages(&mut text, stats);
    line(&mut text, "# EOF");
    text
}

/// How old keys were when their duplicates came.
fn retry_ages(text: &mut String, stats: &Stats) {
    head(text, "retry_age_seconds", "histogram", "How old keys were when their duplicates came.");
    let mut below = 0;
    for (at_most, count) in stats.retry_ages.buckets() {
        below += count;
        let at_most = bound(at_most.as_secs_f64());
        line(text, &format!("keyonce_retry_age_seconds_bucket{{le=\"{at_most}\"}} {below}"));
    }
    line(text, &format!("keyonce_retry_age_seconds_bucket{{le=\"+Inf\"}} {}", stats.retry_ages.count()));
    // OpenMetrics has a count only where there is a sum, which is not known.
}

/// The bound of a bucket, as OpenMetrics spells numbers: with a point, and from a million on with an exponent.
fn bound(seconds: f64) -> String {
    if seconds < 1e6 { format!("{seconds:?}") } else { format!("{seconds:e}").replace('e', "e+0") }
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    line(text, &format!("# TYPE keyonce_{name} {kind}"));
    line(text, &format!("# HELP keyonce_{name} {help}"));
}

fn line(text: &mut String, line: &str) {
    writeln!(text, "{line}").expect("writing to a string never fails");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_spelled_as_strict_readers_want_them() {
        let spelled = [(0.0, "0.0"), (0.001, "0.001"), (60.0, "60.0"), (65.535, "65.535"), (1e6, "1e+06")];
        for (seconds, bound_of_it) in spelled {
            assert_eq!(bound(seconds), bound_of_it);
        }
        assert_eq!(bound(1_048_575.999), "1.048575999e+06");
    }
}
