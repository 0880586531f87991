//! Reading sandboxes. Nothing here changes a row.

use space_core::SandboxId;
use sqlx::{QueryBuilder, Sqlite};

use super::sandboxes::{COLUMNS, FROM, SandboxFilter, SandboxRow, corrupt, parse};
use super::{Store, StoreError};

impl Store {
    pub async fn sandbox(&self, id: &SandboxId) -> Result<Option<SandboxRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} {FROM} WHERE s.id = $1");
        let row = sqlx::query(&sql).bind(id.as_str()).fetch_optional(&self.readers).await?;
        row.as_ref().map(parse).transpose()
    }

    /// By id, or by the name of one that is not deleted.
    pub async fn find_sandbox(&self, project: &str, id_or_name: &str) -> Result<Option<SandboxRow>, StoreError> {
        let by = if id_or_name.starts_with(SandboxId::PREFIX) {
            "s.id = $2"
        } else {
            "s.name = $2 AND s.state <> 'deleted'"
        };
        let sql = format!("SELECT {COLUMNS} {FROM} WHERE s.project = $1 AND {by}");
        let row = sqlx::query(&sql).bind(project).bind(id_or_name).fetch_optional(&self.readers).await?;
        row.as_ref().map(parse).transpose()
    }

    /// Newest first; one more than `limit` when there are more.
    pub async fn list_sandboxes(&self, project: &str, filter: &SandboxFilter) -> Result<Vec<SandboxRow>, StoreError> {
        let mut query = QueryBuilder::<Sqlite>::new(format!("SELECT {COLUMNS} {FROM} WHERE s.project = "));
        query.push_bind(project);
        if filter.states.is_empty() {
            query.push(" AND s.state <> 'deleted'");
        } else {
            query.push(" AND s.state IN (");
            let mut list = query.separated(", ");
            for state in &filter.states {
                list.push_bind(state.as_str());
            }
            query.push(")");
        }
        if let Some(template) = &filter.template_ref {
            query.push(" AND s.template_ref = ").push_bind(template);
        }
        if let Some(digest) = &filter.template_digest {
            query.push(" AND s.template_digest = ").push_bind(digest);
        }
        for (key, value) in &filter.metadata {
            query.push(" AND EXISTS (SELECT 1 FROM metadata m WHERE m.sandbox = s.id AND m.key = ").push_bind(key);
            query.push(" AND m.value = ").push_bind(value).push(")");
        }
        if let Some(before) = &filter.before {
            query.push(" AND s.id < ").push_bind(before.as_str());
        }
        query.push(" ORDER BY s.id DESC LIMIT ").push_bind(i64::from(filter.limit) + 1);
        query.build().fetch_all(&self.readers).await?.iter().map(parse).collect()
    }

    /// Sandboxes that somebody must carry on with.
    pub async fn transient_sandboxes(&self) -> Result<Vec<SandboxId>, StoreError> {
        self.ids(
            "SELECT id FROM sandboxes WHERE state IN ('creating', 'suspending', 'stopping', 'waking', 'deleting')",
            &[],
        )
        .await
    }

    /// Sandboxes whose time is up and that nobody deletes yet.
    pub async fn expired_sandboxes(&self, now_ms: i64) -> Result<Vec<SandboxId>, StoreError> {
        let sql =
            "SELECT id FROM sandboxes WHERE expires_at_ms <= $1 AND state NOT IN ('deleting', 'deleted') LIMIT 1000";
        self.ids(sql, &[now_ms]).await
    }

    /// Sandboxes that should have a run on a node and are in nobody's hands.
    pub async fn settled_sandboxes(&self) -> Result<Vec<SandboxRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} {FROM} WHERE s.state IN ('running', 'paused')");
        sqlx::query(&sql).fetch_all(&self.readers).await?.iter().map(parse).collect()
    }

    async fn ids(&self, sql: &str, binds: &[i64]) -> Result<Vec<SandboxId>, StoreError> {
        let mut query = sqlx::query_scalar::<_, String>(sql);
        for bind in binds {
            query = query.bind(*bind);
        }
        let ids = query.fetch_all(&self.readers).await?;
        ids.into_iter().map(|id| id.parse().map_err(|e| corrupt(&e))).collect()
    }
}
