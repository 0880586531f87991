//! The schema refuses what cannot be, and guarded updates decide races.

use proptest::prelude::*;
use space_core::{OperationId, SandboxId, SandboxState};

use super::*;

pub const DIGEST: &str = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

async fn store() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().expect("a folder");
    let store = Store::open(&dir.path().join("control.db")).await.expect("a store");
    let template = TemplateRow {
        digest: DIGEST.into(),
        memory_mib: 256,
        vcpus: 1,
        disk_bytes: 1 << 30,
        info: "{}".into(),
        created_at_ms: 1,
    };
    store.sync_templates(vec![template]).await.expect("a template");
    (dir, store)
}

fn new(name: &str) -> NewSandbox {
    NewSandbox {
        id: SandboxId::new(),
        project: "default".into(),
        name: name.into(),
        template_ref: "seed:latest".into(),
        template_digest: DIGEST.into(),
        memory_mib: 256,
        vcpus: 1,
        disk_bytes: 1 << 30,
        env: Default::default(),
        metadata: [("k".to_owned(), "v".to_owned())].into(),
        now_ms: 1,
        expires_at_ms: None,
    }
}

async fn made(store: &Store, name: &str) -> SandboxRow {
    let new = new(name);
    let id = new.id.clone();
    store.create_sandbox(new, OperationId::new(), None).await.expect("made");
    store.sandbox(&id).await.expect("read").expect("there")
}

fn up(row: &SandboxRow, observation: u64, state: RunWord) -> Observation {
    Observation { run: row.run, state, node: "local".into(), observation, reason: None }
}

#[tokio::test]
async fn the_schema_knows_exactly_the_states_of_core() {
    let (_dir, store) = store().await;
    let row = made(&store, "a").await;
    let set = |word: String, desired: &'static str, reason: Option<&'static str>, deleted: Option<i64>| {
        let id = row.id.clone();
        let store = store.clone();
        async move {
            store
                .writer
                .write(move |c| {
                    Box::pin(async move {
                        sqlx::query("UPDATE sandboxes SET state = $1, desired = $2, reason = $3, deleted_at_ms = $4 WHERE id = $5")
                            .bind(word)
                            .bind(desired)
                            .bind(reason)
                            .bind(deleted)
                            .bind(id.as_str())
                            .execute(c)
                            .await?;
                        Ok(())
                    })
                })
                .await
                .is_ok()
        }
    };
    for state in SandboxState::ALL {
        let ending = matches!(state, SandboxState::Deleting | SandboxState::Deleted);
        let desired = if ending { "deleted" } else { "running" };
        let reason = (state == SandboxState::Failed).then_some("vm_exited: it ended");
        let deleted = (state == SandboxState::Deleted).then_some(1);
        assert!(set(state.as_str().into(), desired, reason, deleted).await, "{state}");
        assert!(
            !set(state.as_str().into(), if ending { "running" } else { "deleted" }, reason, deleted).await,
            "{state}"
        );
        let other = if deleted.is_some() { None } else { Some(1) };
        assert!(!set(state.as_str().into(), desired, reason, other).await, "{state} with another time of deletion");
    }
    assert!(!set("failed".into(), "running", None, None).await, "failed without a reason");
    assert!(!set("running".into(), "running", Some("why"), None).await, "running with a reason");
    assert!(!set("flying".into(), "running", None, None).await);
    let schema = include_str!("schema.sql");
    for word in RunWord::ALL {
        assert!(schema.contains(&format!("'{}'", word.as_str())));
    }
}

#[tokio::test]
async fn names_are_unique_while_not_deleted() {
    let (_dir, store) = store().await;
    let first = made(&store, "a").await;
    let second = store.create_sandbox(new("a"), OperationId::new(), None).await;
    assert!(matches!(second, Err(StoreError::NameTaken)), "{second:?}");
    let Deletion::Operation(_) = store.request_delete(first.id.clone(), 2).await.expect("asked") else { panic!() };
    let row = store.sandbox(&first.id).await.expect("read").expect("there");
    assert_eq!(store.delete_done(row, 3).await.expect("done"), Moved::Updated(space_core::Generation(3)));
    made(&store, "a").await;
}

#[tokio::test]
async fn an_operation_with_a_used_key_leaves_nothing() {
    let (_dir, store) = store().await;
    let key = IdempotencyKey::new("default", "k", b"request");
    store.create_sandbox(new("a"), OperationId::new(), Some(key.clone())).await.expect("first");
    let second = store.create_sandbox(new("b"), OperationId::new(), Some(key)).await;
    assert!(matches!(second, Err(StoreError::KeySeen)), "{second:?}");
    let filter = SandboxFilter { limit: 10, ..Default::default() };
    assert_eq!(store.list_sandboxes("default", &filter).await.expect("list").len(), 1);
}

#[tokio::test]
async fn writes_that_wait_together_succeed_and_fail_alone() {
    let (_dir, store) = store().await;
    let tasks: Vec<_> = (0..200)
        .map(|n| {
            let store = store.clone();
            tokio::spawn(
                async move { store.create_sandbox(new(&format!("n{}", n / 2)), OperationId::new(), None).await },
            )
        })
        .collect();
    let mut good = 0;
    for task in tasks {
        match task.await.expect("no panic") {
            Ok(()) => good += 1,
            Err(error) => assert!(matches!(error, StoreError::NameTaken), "{error}"),
        }
    }
    assert_eq!(good, 100);
}

#[tokio::test]
async fn a_template_in_use_stays_and_one_that_goes_takes_no_more() {
    let (_dir, store) = store().await;
    store.tag_template(DIGEST.into(), "seed".into(), "latest".into()).await.expect("tagged");
    store.tag_template(DIGEST.into(), "seed".into(), "v1".into()).await.expect("tagged");
    assert_eq!(store.untag_template("seed".into(), "v1".into()).await.expect("untag"), TagRemoval::Untagged);
    let row = made(&store, "a").await;
    let refused = store.untag_template("seed".into(), "latest".into()).await;
    assert!(matches!(refused, Err(StoreError::InUse(1))), "{refused:?}");
    store.request_delete(row.id.clone(), 2).await.expect("asked");
    let row = store.sandbox(&row.id).await.expect("read").expect("there");
    store.delete_done(row, 3).await.expect("done");
    let marked = store.untag_template("seed".into(), "latest".into()).await.expect("marked");
    assert_eq!(marked, TagRemoval::Deleting { digest: DIGEST.into() });
    let late = store.create_sandbox(new("b"), OperationId::new(), None).await;
    assert!(matches!(late, Err(StoreError::NoTemplate)), "{late:?}");
    store.template_delete_done(DIGEST.into(), true).await.expect("gone");
    assert!(store.deleting_templates().await.expect("list").is_empty());
}

#[tokio::test]
async fn an_older_observation_changes_nothing_and_gone_is_final() {
    let (_dir, store) = store().await;
    let row = made(&store, "a").await;
    store.create_succeeded(row.clone(), up(&row, 5, RunWord::Running), 2).await.expect("up");
    assert!(!store.observe_run(row.id.clone(), up(&row, 4, RunWord::Paused), 3).await.expect("old"));
    assert!(store.observe_run(row.id.clone(), up(&row, 6, RunWord::Paused), 3).await.expect("new"));
    assert!(store.observe_run(row.id.clone(), up(&row, 1, RunWord::Gone), 4).await.expect("gone"));
    assert!(!store.observe_run(row.id.clone(), up(&row, 9, RunWord::Running), 5).await.expect("late"));
    let row = store.sandbox(&row.id).await.expect("read").expect("there");
    assert_eq!(row.state, SandboxState::Failed);
    assert!(row.reason.is_some());
}

#[tokio::test]
async fn a_store_of_another_version_is_refused() {
    let (dir, store) = store().await;
    store
        .writer
        .write(|c| {
            Box::pin(
                async move { Ok(sqlx::query("UPDATE schema_version SET version = 99").execute(c).await.map(drop)?) },
            )
        })
        .await
        .expect("written");
    drop(store);
    let again = Store::open(&dir.path().join("control.db")).await;
    assert!(matches!(again, Err(StoreError::Version { found: 99 })));
}

#[tokio::test]
async fn the_last_admin_key_stays() {
    let (_dir, store) = store().await;
    let key = |scope| KeyRow {
        id: space_core::KeyId::new(),
        name: "k".into(),
        scope,
        hash: format!("{scope:?}"),
        created_at_ms: 1,
        last_used_at_ms: None,
    };
    let (admin, user) = (key(space_api::Scope::Admin), key(space_api::Scope::Use));
    store.insert_key(admin.clone()).await.expect("in");
    store.insert_key(user.clone()).await.expect("in");
    assert!(matches!(store.revoke_key(admin.id.clone()).await, Err(StoreError::LastAdminKey)));
    assert!(store.revoke_key(user.id.clone()).await.expect("out"));
    assert!(!store.revoke_key(user.id).await.expect("not there"));
    assert!(store.key(&admin.id).await.expect("read").is_some());
}

/// What two copies of the control plane may do to one sandbox, each with a row it may have read long ago.
#[derive(Clone, Copy, Debug)]
enum Act {
    Read(usize),
    Succeed(usize),
    Fail(usize),
    Delete,
    Deleted(usize),
    Observe(RunWord),
}

fn act() -> impl Strategy<Value = Act> {
    let copy = 0usize..2;
    prop_oneof![
        copy.clone().prop_map(Act::Read),
        copy.clone().prop_map(Act::Succeed),
        copy.clone().prop_map(Act::Fail),
        Just(Act::Delete),
        copy.prop_map(Act::Deleted),
        prop::sample::select(RunWord::ALL.to_vec()).prop_map(Act::Observe),
    ]
}

async fn play(acts: Vec<Act>) {
    let (_dir, store) = store().await;
    let first = made(&store, "a").await;
    let mut copies = [first.clone(), first.clone()];
    let mut last = first.clone();
    for (at, act) in acts.into_iter().enumerate() {
        let now = 10 + at as i64;
        let outcome = match act {
            Act::Read(copy) => {
                copies[copy] = last.clone();
                continue;
            }
            Act::Succeed(copy) => {
                let row = copies[copy].clone();
                store.create_succeeded(row.clone(), up(&row, 1, RunWord::Running), now).await
            }
            Act::Fail(copy) => store.create_failed(copies[copy].clone(), "x".into(), "why".into(), now).await,
            Act::Delete => store.request_delete(first.id.clone(), now).await.map(|_| Moved::Lost),
            Act::Deleted(copy) => store.delete_done(copies[copy].clone(), now).await,
            Act::Observe(word) => {
                store.observe_run(first.id.clone(), up(&first, at as u64 + 2, word), now).await.map(|_| Moved::Lost)
            }
        };
        let row = store.sandbox(&first.id).await.expect("read").expect("there");
        match outcome {
            Ok(Moved::Updated(generation)) => assert_eq!(generation, row.generation),
            Ok(Moved::Lost) | Err(StoreError::IllegalMove { .. }) => {}
            Err(error) => panic!("{act:?}: {error}"),
        }
        assert!(row.generation >= last.generation);
        if row.state == last.state {
            assert_eq!(row.generation, last.generation, "{act:?} changed nothing but the generation");
        } else {
            assert!(last.state.may_become(row.state), "{act:?}: {} became {}", last.state, row.state);
        }
        let open = store.list_operations("default", Some(&first.id), None, 10).await.expect("operations");
        let open = open.iter().filter(|o| !o.state.ended()).count();
        let expected = usize::from(row.state.is_transient());
        assert_eq!(open, expected, "{act:?}: {} with {open} open operations", row.state);
        last = row;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    /// Whoever writes with whatever old knowledge: only legal moves happen, each makes the generation larger, and a
    /// sandbox in transit has exactly one open operation.
    #[test]
    fn guarded_updates_hold(acts in prop::collection::vec(act(), 1..25)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(play(acts));
    }
}
