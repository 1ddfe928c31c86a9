const find=document.getElementById('find');
if(find)find.addEventListener('input',()=>{const words=find.value.toLowerCase().split(/\s+/);
for(const row of document.querySelectorAll('.cells tbody tr')){const text=row.textContent.toLowerCase();
row.hidden=!words.every(word=>text.includes(word))}});
