//! Deaths: every process of a server, at every named point and at any time, and VMMs too. Nothing that runs is lost,
//! every create and delete comes to its end without a hand, and nothing is left.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use space_tests::{Answer, Api, Attached, Sandbox, Server, processes_of, shared_or_skip, status_of, vmms_in};

/// Each named point once, and some at any time. `SPACE_DRILL_DEATHS` asks for more.
const DEATHS: usize = 44;
/// For one call, however often a process behind it dies.
const PATIENCE: Duration = Duration::from_secs(90);
/// Lives until a point must have been reached.
const TRIES: usize = 8;
/// At the same time, so that some find a parked VM and some do not.
const AT_ONCE: usize = 3;

/// A call that is made again until the server answers it, as a client would that holds an idempotency key.
async fn insist(api: &Api, method: &str, path: &str, body: Option<Value>, key: &str) -> Result<Answer> {
    let begun = Instant::now();
    loop {
        let mut request = api.request(method, path).header("Idempotency-Key", key);
        if let Some(body) = &body {
            request = request.json(body);
        }
        match api.send(request).await {
            Ok(answer) if answer.status < 500 => return Ok(answer),
            other if begun.elapsed() > PATIENCE => bail!("{method} {path}: still {other:?}"),
            _ => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

/// Waits for the end of an operation.
async fn finished(api: &Api, answer: Answer) -> Result<Value> {
    let begun = Instant::now();
    let id = answer.body["id"].as_str().with_context(|| format!("no operation: {answer:?}"))?.to_owned();
    loop {
        let now = insist(api, "GET", &format!("/v1/operations/{id}?wait=10"), None, "").await?;
        if ["succeeded", "failed"].contains(&now.body["state"].as_str().unwrap_or("")) {
            return Ok(now.body);
        }
        ensure!(begun.elapsed() < PATIENCE, "an operation does not end: {now:?}");
    }
}

fn key() -> String {
    format!("drill-{:x}", Instant::now().elapsed().as_nanos() ^ u128::from(rand()))
}

fn rand() -> u64 {
    use std::hash::{BuildHasher as _, Hasher as _};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

/// Runs a command in it, again when a process died on the way.
async fn says(sandbox: &Sandbox, script: &str) -> Result<String> {
    let begun = Instant::now();
    loop {
        match sandbox.sh(script).await {
            Ok(ended) => return ended.ok(),
            Err(error) if begun.elapsed() > PATIENCE => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

/// From a create to a delete. `kill`: its VMM dies in between.
async fn life(server: &Server, api: Api, name: String, kill: bool) -> Result<()> {
    let body = json!({"template": "tiny", "name": name, "env": {"DRILL": name}});
    let created = finished(&api, insist(&api, "POST", "/v1/sandboxes", Some(body), &key()).await?).await?;
    ensure!(created["state"] == "succeeded", "create: {created}");
    let id = created["sandbox_id"].as_str().context("no id")?.to_owned();
    let sandbox = Sandbox { id: id.clone(), api: api.clone() };
    // What a guest must never lack when it is handed out: who it is, and what time it is.
    let said = says(&sandbox, "hostname; echo $DRILL; date +%s").await?;
    let words: Vec<&str> = said.split_whitespace().collect();
    ensure!(words.len() == 3 && words[0] == name && words[1] == name, "{name} says {words:?}");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
    ensure!(now.abs_diff(words[2].parse()?) < 20, "{name} thinks that it is {}, not {now}", words[2]);
    if kill {
        for pid in vmms_in(&server.data_dir.join("pool/sandboxes").join(&id)) {
            std::process::Command::new("/bin/kill").args(["-9", &pid.to_string()]).status()?;
        }
        let begun = Instant::now();
        while insist(&api, "GET", &sandbox.path(""), None, "").await?.body["state"] != "failed" {
            ensure!(begun.elapsed() < PATIENCE, "nobody noticed that its VMM died");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    std::mem::forget(sandbox);
    let deleted = insist(&api, "DELETE", &format!("/v1/sandboxes/{id}"), None, &key()).await?;
    // Gone already: a delete whose answer was lost.
    ensure!(deleted.status == 404 || finished(&api, deleted).await?["state"] == "succeeded", "delete of {id}");
    Ok(())
}

/// A template built and deleted.
async fn template(api: &Api, source: &Path, tag: &str) -> Result<()> {
    let body = json!({
        "tag": tag,
        "source": format!("dir:{}", source.display()),
        "options": {"memory_mib": 128, "disk_bytes": 64 << 20},
    });
    for _ in 0..3 {
        let answer = insist(api, "POST", "/v1/templates", Some(body.clone()), &key()).await?;
        let built = finished(api, answer).await?;
        if built["state"] == "succeeded" {
            let answer = insist(api, "DELETE", &format!("/v1/templates/{tag}"), None, &key()).await?;
            ensure!(answer.status < 300 || answer.status == 404, "{answer:?}");
            return Ok(());
        }
        // A build is not resumed: who wants it asks again.
        ensure!(built["error"]["code"].as_str().is_some(), "{built}");
    }
    bail!("a template could not be built three times over")
}

/// A point of the drill, and whether a build is what reaches it.
fn points() -> Vec<(&'static str, bool)> {
    let control = space_control::Points::ALL.iter();
    let all = space_hostd::points::ALL.iter().chain(control);
    all.map(|point| (*point, point.contains("build") || point.starts_with("template"))).collect()
}

/// Ends one process of the server, from outside.
fn kill_one(server: &Server, which: usize) -> Result<()> {
    let all = processes_of(server.pid().context("no server")?);
    let pid = all.get(1 + which % (all.len() - 1).max(1)).context("a server without processes")?;
    std::process::Command::new("/bin/kill").args(["-9", &pid.to_string()]).status()?;
    Ok(())
}

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Some lives at the same time; the VMM of one may die in them.
async fn lives(server: &Server, api: &Api, n: usize) -> Result<()> {
    let lives = (0..AT_ONCE).map(|i| life(server, api.clone(), format!("d{n}-{i}"), i == 0 && n % 4 == 3));
    futures::future::join_all(lives).await.into_iter().collect()
}

/// A death while there are lives, at no particular moment.
async fn any(server: &Server, api: &Api, n: usize) -> Result<()> {
    let chaos = async {
        tokio::time::sleep(Duration::from_millis(rand() % 400)).await;
        kill_one(server, n)
    };
    let (lives, chaos) = tokio::join!(lives(server, api, n), chaos);
    chaos.and(lives)
}

/// Lives, and a build if one is needed for that, until a process has come to the point and died there.
async fn at_point(server: &Server, api: &Api, n: usize, point: &str, source: Option<&PathBuf>) -> Result<()> {
    let new = server.drill().with_extension("new");
    std::fs::write(&new, point)?;
    std::fs::rename(&new, server.drill())?;
    for _ in 0..TRIES {
        lives(server, api, n).await?;
        if let Some(source) = source {
            template(api, source, &format!("t{n}:1")).await?;
        }
        // What happens behind the lives: VMs are parked for the next ones, which some points need.
        for _ in 0..40 {
            if !server.drill().exists() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    let _ = std::fs::remove_file(server.drill());
    bail!("nobody came to it")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deaths_lose_nothing_and_leave_nothing() -> Result<()> {
    let shared = shared_or_skip!();
    let server = Server::own("[warm]\nper_template = \"1\"\n").await?;
    let api = server.api()?;
    // What the template `tiny` was made of.
    let source = shared.data_dir.with_file_name("tiny");
    let long = api.sandbox("tiny").await?;
    let session = long.command(&["sh", "-c", "i=0; while :; do echo tick $i; i=$((i+1)); sleep 0.2; done"], json!({}));
    let session = session.await?;
    let mut stream = Attached::open(&session, 0).await?;
    stream.until("tick 3\n", 60).await?;
    let vmm = vmms_in(&server.data_dir.join("pool/sandboxes").join(&long.id));
    let descriptors =
        || Ok::<_, anyhow::Error>(std::fs::read_dir(format!("/proc/{}/fd", server.pid().unwrap_or(0)))?.count());
    let before = descriptors()?;
    let templates = names(&server.data_dir.join("pool/templates"));

    let points = points();
    let deaths = std::env::var("SPACE_DRILL_DEATHS").ok().map_or(Ok(DEATHS), |text| text.parse())?;
    for n in 0..deaths {
        let (point, builds) = points[n % points.len()];
        // Once around the named points; then also at any time, whatever it is doing.
        let named = n < points.len() || n % 2 == 0;
        let began = Instant::now();
        let done = if named {
            at_point(&server, &api, n, point, builds.then_some(&source)).await
        } else {
            any(&server, &api, n).await
        };
        done.with_context(|| format!("death {n}, at {point} (named: {named})\n{}", server.log()))?;
        println!("death {n}: {} in {:?}", if named { point } else { "at any time" }, began.elapsed());
    }

    // What ran all the time is the same VM, and its output has no gap.
    assert_eq!(vmms_in(&server.data_dir.join("pool/sandboxes").join(&long.id)), vmm);
    let id = session["id"].as_str().unwrap_or("");
    let again = insist(&api, "POST", &long.path(&format!("/commands/{id}/attach")), Some(json!({})), "").await?;
    let mut again = Attached::open(&again.body, stream.offset).await?;
    again.until("tick 60\n", 60).await?;
    assert_eq!(again.dropped_until, 0);
    let text = String::from_utf8([stream.stdout.clone(), again.stdout.clone()].concat())?;
    for (n, line) in text.lines().take(60).enumerate() {
        assert_eq!(line, format!("tick {n}"));
    }
    drop((stream, again));
    assert_eq!(
        names(&server.data_dir.join("pool/templates")),
        templates,
        "a build left a template that nobody asked for"
    );
    nothing_is_left(&server, &long.id, before, descriptors).await
}

/// Only the one sandbox, and what is parked.
async fn nothing_is_left(
    server: &Server,
    kept: &str,
    before: usize,
    descriptors: impl Fn() -> Result<usize>,
) -> Result<()> {
    let pool = server.data_dir.join("pool");
    assert_eq!(names(&pool.join("sandboxes")), BTreeSet::from([kept.to_owned()]));
    let mut tmp = names(&pool.join("tmp"));
    for _ in 0..100 {
        if tmp.len() <= 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        tmp = names(&pool.join("tmp"));
    }
    assert!(tmp.len() <= 1 && tmp.iter().all(|name| name.starts_with("warm-")), "{tmp:?}");
    assert_eq!(names(&server.data_dir.join("build")), BTreeSet::new());
    let up = server.pid().context("no server")?;
    assert_eq!(processes_of(up).len(), 4, "space up, space-hostd, node, control");
    let now = descriptors()?;
    assert!(now <= before + 4, "space up held {before} descriptors and holds {now}");
    assert!(status_of(up, "Threads")?.parse::<u32>()? < 32);
    Ok(())
}
