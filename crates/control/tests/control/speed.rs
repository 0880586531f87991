//! How much of a create is the control plane's own: measured against a node that does nothing. Prints; asserts only what a
//! slow machine holds too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::Cloud;

fn percentile(times: &mut [Duration], p: usize) -> f64 {
    times.sort();
    times[(times.len() * p / 100).min(times.len() - 1)].as_secs_f64() * 1000.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn creates_cost_little() {
    let cloud = Arc::new(Cloud::start().await);
    let mut times = Vec::new();
    for _ in 0..200 {
        let begun = Instant::now();
        cloud.sandbox(json!({})).await;
        times.push(begun.elapsed());
    }
    let (p50, p90) = (percentile(&mut times, 50), percentile(&mut times, 90));
    println!("create, one after the other: p50 {p50:.2} ms, p90 {p90:.2} ms");
    assert!(p50 < 200.0);

    let total = 2000;
    let begun = Instant::now();
    let clients = (0..64).map(|_| {
        let cloud = cloud.clone();
        tokio::spawn(async move {
            for _ in 0..total / 64 {
                cloud.sandbox(json!({})).await;
            }
        })
    });
    for client in futures::future::join_all(clients).await {
        client.expect("no panic");
    }
    let rate = f64::from(total) / begun.elapsed().as_secs_f64();
    println!("create, 64 clients at once: {rate:.0} per second");
}
